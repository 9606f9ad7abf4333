"""Draw the figures of chapter 2 from the library's own objects.

`python book/figures/before.py [FOLDER]` writes before_rungs.svg, before_scales.svg and before_offload.svg.
"""

import sys
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from shardlab import show
from shardlab.cost import forward_flops, memory, serving
from shardlab.show.palette import HELD, INK, WORK
from shardlab.show.palette import ladder as tints
from shardlab.show.picture import Picture
from shardlab.specs import Packed, find_card, find_link, find_model, format_of

SEVENTY, H100 = find_model("llama-3.1-70b"), find_card("h100")
LOAD = {"context": 8192, "concurrency": 32}
ROWS, COLUMNS, LINE = 256, 512, 16  # a matrix, and how many of its rows a line of the picture stands for
LAYERS = 4  # drawn of a model


def rungs() -> Picture:
    """What one card would have to hold of the 70B and its users, in fewer and fewer bits."""
    ways = {"bf16": ("bf16", "bf16"), "fp8": ("fp8", "bf16"), "fp8, fp8 cache": ("fp8", "fp8"),
            "int4, fp8 cache": ("int4", "fp8")}
    bars = {}
    for name, (dtype, kv_dtype) in ways.items():
        bill = serving(SEVENTY, dtype=dtype, kv_dtype=kv_dtype, **LOAD)
        parts = {"weights": bill.weights, "KV cache": bill.part("KV cache")}
        rest = bill.per_rank - sum(parts.values())
        bars[name] = {kind: nbytes / 1e9 for kind, nbytes in (parts | {"buffers": rest}).items()}
    return show.stacked(bars, "GB", (f"an H100: {H100.memory / 1e9:.1f} GB", H100.memory / 1e9))


def scales() -> Picture:
    """Which numbers of a matrix share a scale, in three formats."""
    figure = Picture(figsize=(6.4, 2.6), layout="constrained")
    for axes, name in zip(figure.subplots(1, 3), ("int8", "int4", "fp8"), strict=True):
        packed = format_of(name).matrix
        matrix(axes, packed)
        axes.set_title(f"{name}\n{packed.scales((ROWS, COLUMNS)):,} scales", fontsize=15, color=INK)
        axes.set_xlabel({"int8": "one a row", "int4": "one for\n128 of a row", "fp8": "one for\n128 × 128"}[name],
                        fontsize=15, color=INK)
    return figure


def matrix(axes: Axes, packed: Packed) -> None:
    """A matrix of ROWS × COLUMNS, its blocks in two tints by turns, one of them full."""
    down, across = packed.block or (0, 0)
    high, wide = max(down, LINE), across or COLUMNS  # a single row would be too thin to see
    full, *_, light, pale = tints(HELD["weights"], 6)
    for i in range(ROWS // high):
        for j in range(COLUMNS // wide):
            colour = full if i == j == 0 else (light, pale)[(i + j) % 2]
            axes.add_patch(Rectangle((j * wide, i * high), wide, high, facecolor=colour, edgecolor="white"))
    axes.set_xlim(0, COLUMNS)
    axes.set_ylim(ROWS, 0)
    axes.set_aspect("equal")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_color(INK)


def offload() -> Picture:
    """The first layers of the 70B streamed over PCIe 5: when each is copied, and when it is computed."""
    copy = layer() / find_link(str(H100.host_link)).per_direction
    short, long = (work_of(prompts) for prompts in (2, 8))
    figure = Picture(figsize=(6.4, 5.6), layout="constrained")
    axes = figure.subplots()
    cases = {"one token, prefetched": (copy, layer() / H100.hbm, True), "8,192 tokens, in turns": (copy, short, False),
             "8,192 tokens, prefetched": (copy, short, True), "32,768 tokens, prefetched": (copy, long, True)}
    longest = LAYERS * long + copy
    for row, (name, (move, work, ahead)) in enumerate(cases.items()):
        lanes(axes, 1.5 * row, name, move, work, ahead, longest)
    axes.set_xlim(-0.13 * longest, 1.02 * longest)
    axes.set_ylim(1.5 * len(cases) - 0.4, -0.6)
    axes.set_axis_off()
    return figure


def layer() -> float:
    """Bytes of one layer's weights."""
    groups = memory(SEVENTY, dtype="bf16").groups
    return (groups["attention"] + groups["mlp"]) / SEVENTY.layers


def work_of(prompts: int) -> float:
    """Seconds to compute a layer for so many prompts of 4,096 tokens, at the card's peak."""
    return forward_flops(SEVENTY, 4096, prompts) / SEVENTY.layers / H100.flop_rate("bf16")


def lanes(axes: Axes, y: float, name: str, move: float, work: float, ahead: bool, longest: float) -> None:
    """One case: the link's lane and the card's. `ahead`: a layer is copied while the one before is computed."""
    axes.text(0, y - 0.12, name, fontsize=15, color=INK, va="bottom")
    copied, done = 0.0, [0.0, 0.0]  # there is room for two layers: one comes when the one before the last is done
    for _ in range(LAYERS):
        start = max(copied, done[-2]) if ahead else done[-1]
        copied = start + move
        begin = max(copied, done[-1])
        done.append(begin + work)
        for dy, x, width, colour in ((0, start, move, HELD["weights"]), (0.45, begin, work, WORK["forward"])):
            gap = min(0.004 * longest, 0.3 * width)
            axes.add_patch(Rectangle((x, y + dy), width - gap, 0.4, facecolor=colour))
    for dy, lane in ((0, "link"), (0.45, "card")):
        axes.text(-0.015 * longest, y + dy + 0.2, lane, fontsize=14, color=INK, ha="right", va="center")


def draw(folder: Path) -> None:
    """Write all pictures into `folder`."""
    pictures = {"before_rungs": rungs(), "before_scales": scales(), "before_offload": offload()}
    for name, picture in pictures.items():
        picture.write_svg(folder / f"{name}.svg")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
