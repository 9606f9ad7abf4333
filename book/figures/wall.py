"""Draw the figures of chapter 1 from the library's own objects.

`python book/figures/wall.py [FOLDER]` writes wall_cards.svg, wall_bytes.svg, wall_training.svg, wall_experts.svg,
wall_cache.svg and wall_races.svg.
"""

import random
import sys
from dataclasses import replace
from pathlib import Path

from matplotlib.patches import Rectangle

from shardlab import show
from shardlab.cost import MemoryBill, checkpoint, kv_per_token, memory, training
from shardlab.show.palette import HELD, INK
from shardlab.show.picture import Picture
from shardlab.specs import ModelSpec, find_card, find_model

V3, V4, SEVENTY = (find_model(name) for name in ("deepseek-v3", "deepseek-v4-pro", "llama-3.1-70b"))
NAMES = {"weights": "weights", "gradients": "gradients", "master weights": "master_weights", "moments": "moments"}


def cards() -> Picture:
    """Weights over cards of the usual kind, as the driver reports them."""
    return show.over_cards({"DeepSeek-V3, bf16": memory(V3, dtype="bf16").weights,
                            "DeepSeek-V3, as published": checkpoint(V3, copies=1),
                            "Llama 3.1 70B, bf16": memory(SEVENTY, dtype="bf16").weights}, find_card("h800"))


def parts(bill: MemoryBill, one: float) -> dict[str, float]:
    """What a bill is made of, in multiples of `one`; AdamW's step counters, a few kB, left out."""
    states = {kind: getattr(bill, name) for kind, name in NAMES.items()}
    beside = {kind: bill.part(kind) for kind in ("activations", "logits")}
    return {kind: nbytes / one for kind, nbytes in (states | beside).items() if nbytes}


def bytes_a_parameter() -> Picture:
    """Bytes held for each parameter, to load a model and to train it."""
    bills = {"to load it, bf16": memory(SEVENTY, dtype="bf16"),
             "to train it in fp32": memory(SEVENTY, training=True),
             "to train it in bf16, mixed": memory(SEVENTY, dtype="bf16", training=True, master="fp32"),
             "the same with gradients in fp32": memory(SEVENTY, dtype="bf16", training=True, master="fp32",
                                                       gradients="fp32")}
    return show.stacked({name: parts(bill, SEVENTY.total) for name, bill in bills.items()}, "B")


def training_bill() -> Picture:
    """A 70B in training, without and with recomputation, against what eight cards hold."""
    node = 8 * find_card("h100").memory / 1e9
    bars = {f"{name} recomputation": parts(training(SEVENTY, batch=1, seq=8192, recompute=mode), 1e9)
            for name, mode in (("without", None), ("with full", "full"))}
    return show.stacked(bars, "GB", (f"8 × H100: {node:.0f} GB", node))


def experts() -> Picture:
    """The routed experts of one layer: those that some token of a batch is sent to, each token to its own."""
    mixture = V3.experts
    assert mixture is not None  # it is DeepSeek-V3
    figure, side = Picture(figsize=(6.4, 2.6), layout="constrained"), 16
    chosen: set[int] = set()
    draw = random.Random(1)
    sent = 0
    for axes, tokens in zip(figure.subplots(1, 3), (1, 16, 128), strict=True):
        while sent < tokens:
            chosen |= set(draw.sample(range(mixture.routed), mixture.active))
            sent += 1
        for e in range(mixture.routed):
            style = {"facecolor": HELD["weights"]} if e in chosen else {"facecolor": "none"}
            axes.add_patch(Rectangle((e % side, -(e // side)), 0.8, 0.8, edgecolor=HELD["weights"], linewidth=0.7,
                                     **style))
        axes.text(side / 2, 1.5, f"{tokens} token{'s' * (tokens > 1)}:\n{len(chosen)} of {mixture.routed}", fontsize=15,
                  color=INK, ha="center", va="bottom")
        axes.set_ylim(0.8 - side, 7)
        axes.set_xlim(-0.1, side)
        axes.set_aspect("equal")
        axes.set_axis_off()
    return figure


def per_head(spec: ModelSpec) -> float:
    """Bytes a token would take if every query head had its own key and value."""
    if spec.latent:
        each = spec.latent.nope_dim + spec.latent.rope_dim + spec.latent.value_dim
        return spec.layers * spec.heads * each * 2
    return kv_per_token(replace(spec, kv_heads=spec.heads))


def cache() -> Picture:
    """KV cache a token by kind of attention, and in outline what it would be with keys and values for every head."""
    models = {"Llama 2 7B, MHA": find_model("llama-2-7b"), "Llama 3.1 70B, GQA": SEVENTY, "DeepSeek-V3, MLA": V3}
    figure = Picture(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    longest = max(map(per_head, models.values())) / 1024
    for i, (name, spec) in enumerate(models.items()):
        held, could = kv_per_token(spec) / 1024, per_head(spec) / 1024
        axes.text(0, i - 0.36, f"{name}: {held:,.4g} KiB", fontsize=15, color=INK, va="bottom")
        axes.barh(i, held, height=0.6, color=HELD["KV cache"])
        if could > held:
            axes.barh(i, could, height=0.6, color="none", edgecolor=INK, linewidth=1.6, linestyle="--")
            axes.text(could - 0.01 * longest, i, f"{could:,.4g}", fontsize=15, color=INK, va="center", ha="right")
    axes.set_xlim(0, 1.01 * longest)
    axes.set_ylim(len(models) - 0.55, -0.75)
    axes.set_axis_off()
    return figure


def races() -> Picture:
    """What a model and a card have grown by: parameters, bytes of the published weights, bytes of a card."""
    then, now = find_card("h800"), find_card("b300")
    lines = {"a card's memory": (now.printed / then.printed, HELD["KV cache"]),
             "a model's parameters": (V4.total / V3.total, HELD["moments"]),
             "its published bytes": (checkpoint(V4) / checkpoint(V3, copies=1), HELD["weights"])}
    figure = Picture(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for name, (ratio, colour) in lines.items():
        axes.plot([0, 1], [1, ratio], color=colour, linewidth=3.5, marker="o", markersize=8)
        axes.text(1.05, ratio, f"{name}\n× {ratio:.2f}", fontsize=15, color=colour, va="center", linespacing=1.1)
    axes.text(0, 0.62, "DeepSeek-V3\non H800", fontsize=15, color=INK, ha="center", va="top")
    axes.text(1, 0.62, "V4-Pro\non B300", fontsize=15, color=INK, ha="center", va="top")
    axes.set_xlim(-0.3, 2.05)
    axes.set_ylim(-0.1, 3.9)
    axes.set_axis_off()
    return figure


def draw(folder: Path) -> None:
    """Write all pictures into `folder`."""
    pictures = {"wall_cards": cards(), "wall_bytes": bytes_a_parameter(), "wall_training": training_bill(),
                "wall_experts": experts(), "wall_cache": cache(), "wall_races": races()}
    for name, picture in pictures.items():
        picture.write_svg(folder / f"{name}.svg")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
