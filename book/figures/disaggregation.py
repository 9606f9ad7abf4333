"""Draw the figures of chapter 11: a cache on its way, in bulk and layer by layer; and what a reader waits for it.

`python book/figures/disaggregation.py [FOLDER]` writes disaggregation_protocol.svg and disaggregation_exposed.svg.
Lines and times are the library's account (`cost.handover`), dots what lab 11 measured.
"""

import json
import sys
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from shardlab.cost import Handover, handover, kv_handed
from shardlab.show.measured import MIME
from shardlab.show.palette import HELD, INK, LINES, WORK
from shardlab.show.picture import Picture
from shardlab.specs import LinkSpec, ModelSpec

LAB = Path(__file__).parents[2] / "labs" / "11_disaggregation.ipynb"
SMALL = dict(name="small", hidden=48, heads=4, kv_heads=2, head_dim=12, ffn=96, vocab=101)
TOKENS, PREFILL = 192, 1.0  # the lab's prompt; a prompt's time is the unit here
NAMES = {"bulk": "in bulk", "layers": "layer by layer", "int8": "layer by layer, in int8"}


def moved(layers: int, times: float, kind: str = "layers") -> tuple[Handover, float]:
    """The hand-over on a link of so many times the B* of float32, and seconds that float32 takes on it."""
    spec = ModelSpec(layers=layers, **SMALL)
    whole = kv_handed(spec, TOKENS, dtype="fp32")
    link = LinkSpec(name="paced", per_direction=times * whole / PREFILL)
    found = handover(spec, TOKENS, prefill=PREFILL, link=link, dtype="int8" if kind == "int8" else "fp32")
    return found, whole / link.per_direction


def exposed(kind: str, times: float, layers: int = 16) -> float:
    """What is waited for, of all float32 bytes' time."""
    found, ideal = moved(layers, times, kind)
    return (found.seconds if kind == "bulk" else found.by_layers) / ideal


def quiet(axes: Axes) -> None:
    axes.tick_params(labelsize=14, colors=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)


def protocol() -> Picture:
    """Six layers of a prompt, their transfer and the next tokens, in two ways, on a link of 1.25 B*."""
    layers, times = 6, 1.25
    found, _ = moved(layers, times)
    each, one = PREFILL / layers, found.seconds / layers
    figure = Picture(figsize=(6.4, 5.4), layout="constrained")
    axes = figure.subplots()
    ways = {"in bulk": ([PREFILL + i * one for i in range(layers)], found.seconds),
            "layer by layer": ([(i + 1) * each for i in range(layers)], found.by_layers)}
    colours = {"prefill": WORK["forward"], "link": HELD["KV cache"], "decode": LINES[1]}
    for row, (name, (starts, waits)) in enumerate(ways.items()):
        top = -4.6 * row
        axes.text(0, top + 1.1, name, fontsize=14, color=INK, va="bottom", weight="bold")
        boxes = [("prefill", i * each, each) for i in range(layers)] + [("link", start, one) for start in starts]
        boxes += [("decode", PREFILL + waits + 0.09 * i, 0.09) for i in range(4)]
        for lane, left, wide in boxes:
            y = top - list(colours).index(lane)
            axes.add_patch(Rectangle((left, y), wide, 0.8, facecolor=colours[lane], edgecolor="white", linewidth=1))
        reserved = PREFILL + 0.02 if name == "in bulk" else 0.0
        axes.text(reserved, top - 1.6, "RESERVE", fontsize=14, color=INK, va="center")
        seal = PREFILL + waits
        axes.plot([seal, seal], [top - 2.4, top - 0.1], color=INK, linewidth=1, linestyle=":")
        axes.text(seal, top - 2.45, "SEAL, ACK, FREE", fontsize=14, color=INK, va="top")
        axes.text(PREFILL - 0.02, top - 2.45, "first token", fontsize=14, color=INK, va="top", ha="right")
        axes.plot([PREFILL, PREFILL], [top - 2.4, top + 0.9], color=INK, linewidth=1, linestyle=":")
    axes.set_xlim(-0.01, 2.45)
    axes.set_ylim(-8.0, 1.9)
    axes.set_axis_off()
    names = {"prefill": "a layer of the prompt", "link": "its cache, sent", "decode": "further tokens"}
    figure.legend(handles=[Patch(facecolor=colours[lane], label=text) for lane, text in names.items()],
                  loc="outside lower left", ncols=2, frameon=False, fontsize=14, handlelength=1, labelcolor=INK)
    return figure


def dots() -> dict[str, list[tuple[float, float]]]:
    """(link ÷ B*, share exposed) of each kind, as the lab has them."""
    cells = json.loads(LAB.read_text(encoding="utf-8"))["cells"]
    outputs = [each for cell in cells for each in cell.get("outputs", [])]
    (figures,) = [each["data"][MIME]["figures"] for each in outputs if MIME in each.get("data", {})]
    return {kind: [(figures[f"at_{kind}_{name.split('_')[-1]}"], share) for name, share in figures.items()
                   if name.startswith(f"exposed_{kind}_")] for kind in NAMES}


def curve() -> Picture:
    """The share that is waited for against the speed of the link over B*, account and runs."""
    figure = Picture(figsize=(6.4, 4.6), layout="constrained")
    axes = figure.subplots()
    grid, measured = [0.12 * 1.06**i for i in range(57)], dots()
    for (kind, name), colour in zip(NAMES.items(), LINES, strict=False):
        axes.plot(grid, [exposed(kind, x) for x in grid], color=colour, linewidth=3, label=name)
        axes.plot(*zip(*measured[kind], strict=True), "o", color=colour, markersize=10, markeredgecolor="white")
    axes.set_xscale("log")
    axes.set_xticks([0.125, 0.25, 0.5, 1, 2], ["⅛", "¼", "½", "1", "2"])
    axes.minorticks_off()
    axes.set_yticks([0, 0.5, 1], ["0", "½", "1"])
    axes.axvline(1, color=INK, linewidth=1, linestyle=":")
    axes.set_xlabel("link ÷ B*", fontsize=14, color=INK)
    axes.set_ylabel("exposed, of all bytes' time", fontsize=14, color=INK)
    quiet(axes)
    figure.legend(loc="outside upper left", frameon=False, fontsize=14, labelcolor=INK)
    return figure


def draw(folder: Path) -> None:
    """Write both pictures into `folder`."""
    for name, picture in (("protocol", protocol()), ("exposed", curve())):
        picture.write_svg(folder / f"disaggregation_{name}.svg")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
