"""Draw the figures of chapter 6: the stages of a model, and schedules in time, from the lists that run.

`python book/figures/pipeline.py [FOLDER]` writes pipeline_cut.svg, pipeline_fill.svg, pipeline_flush.svg,
pipeline_interleaved.svg, pipeline_zero.svg, pipeline_dual.svg and pipeline_uneven.svg.
"""

import sys
from pathlib import Path

from matplotlib.patches import FancyArrowPatch, Rectangle

from shardlab import show
from shardlab.cost import Timeline, Times, timeline
from shardlab.schedule import SCHEDULES
from shardlab.show.palette import AXES, INK, WORK, ladder, on
from shardlab.show.picture import Picture
from shardlab.specs import ModelSpec, find_model
from shardlab.specs.stages import split

LLAMA, EIGHT = find_model("llama-3.1-70b"), find_model("llama-3.1-8b")
RANKS, MICROBATCHES = 4, 8  # drawn


def cut() -> Picture:
    """The layers of the 70B in four stages, and what goes from each to the next, forward and backward."""
    figure = Picture(figsize=(6.4, 3.0), layout="constrained")
    axes = figure.subplots()
    tints, wide, gap = ladder(AXES["pp"].colour, RANKS), 1.45, 0.34
    for rank, layers in enumerate(split(LLAMA.layers, RANKS)):
        x = rank * (wide + gap)
        ends = "embedding\n" if rank == 0 else "norm, head" if rank == RANKS - 1 else ""
        text = f"layers\n{layers[0]}–{layers[-1]}"
        text = ends + text if rank == 0 else f"{text}\n{ends}" if ends else text
        axes.add_patch(Rectangle((x, 0), wide, 1.5, facecolor=tints[rank]))
        axes.text(x + wide / 2, 0.75, text, fontsize=14, color=on(tints[rank]), ha="center", va="center")
        axes.text(x + wide / 2, 1.6, f"{AXES['pp'].letter}{rank}", fontsize=16, weight="bold", color=INK, ha="center")
        if rank:
            for y, kind, start, end in ((1.05, "forward", -gap, 0), (0.45, "backward", 0, -gap)):
                axes.add_patch(FancyArrowPatch((x + start, y), (x + end, y), arrowstyle="-|>", mutation_scale=18,
                                               linewidth=4, color=WORK[kind], shrinkA=0, shrinkB=0))
    names = {"forward": f"the stream, tokens × {LLAMA.hidden}", "backward": "its gradient, as large"}
    for i, (kind, name) in enumerate(names.items()):
        y = -0.35 - 0.38 * i
        axes.add_patch(FancyArrowPatch(*((0, y), (0.5, y))[:: 1 if kind == "forward" else -1], arrowstyle="-|>",
                                       mutation_scale=18, linewidth=4, color=WORK[kind], shrinkA=0, shrinkB=0))
        axes.text(0.65, y, name, fontsize=15, color=INK, va="center")
    axes.set_xlim(-0.05, RANKS * (wide + gap) - gap + 0.05)
    axes.set_ylim(-1.0, 2.0)
    axes.set_axis_off()
    return figure


def plan(name: str, microbatches: int = MICROBATCHES, *chunks: int, times: Times | None = None) -> Timeline:
    """A schedule on the drawn ranks, in time."""
    return timeline(SCHEDULES[name](RANKS, microbatches, *chunks), times)


def fill() -> Picture:
    """One batch as it is, and cut into four micro-batches that each take a quarter of its time."""
    whole = Times(4, 4, 4)
    return show.pipeline({"one micro-batch": plan("gpipe", 1, times=whole), "four": plan("gpipe", 4)}, "time")


def flush() -> Picture:
    """GPipe and 1F1B: the same end, other orders."""
    return show.pipeline({"GPipe": plan("gpipe"), "1F1B": plan("1f1b")}, "time")


def interleaved() -> Picture:
    """1F1B, and with the same layers in two stages a rank."""
    return show.pipeline({"1F1B": plan("1f1b", times=Times(2, 2, 2)),
                          "two stages a rank": plan("interleaved", MICROBATCHES, 2)}, "time")


def zero() -> Picture:
    """1F1B, and with backward in two halves."""
    return show.pipeline({"1F1B": plan("1f1b"), "ZB-H1": plan("zero_bubble")}, "time")


def dual() -> Picture:
    """ZB-H1, and DualPipe with two copies of the model."""
    return show.pipeline({"ZB-H1": plan("zero_bubble"), "DualPipe": plan("dualpipe")}, "time")


def stage_times(spec: ModelSpec, weights: list[float] | None) -> list[Times]:
    """What the stages of the drawn ranks take, a layer's forward pass being 1: by parameters, the embedding's none."""
    layer = sum(tensor.size for tensor in spec.layer_tensors())
    head = spec.parameters["head"] / layer
    sizes = [len(layers) for layers in split(spec.layers, RANKS, weights)]
    return [Times(n, n, n) for n in [*sizes[:-1], sizes[-1] + head]]


def uneven() -> Picture:
    """The 8B on four ranks: as many layers each, and split by what layers and head weigh."""
    layer = sum(tensor.size for tensor in EIGHT.layer_tensors())
    weights = [0.0] + [1.0] * EIGHT.layers + [EIGHT.parameters["head"] / layer]
    orders = SCHEDULES["1f1b"](RANKS, MICROBATCHES)
    return show.pipeline({"as many layers each": timeline(orders, stage_times(EIGHT, None)),
                          "by weight": timeline(orders, stage_times(EIGHT, weights))}, "time")


def draw(folder: Path) -> None:
    """Write all pictures into `folder`."""
    pictures = {"pipeline_cut": cut(), "pipeline_fill": fill(), "pipeline_flush": flush(),
                "pipeline_interleaved": interleaved(), "pipeline_zero": zero(), "pipeline_dual": dual(),
                "pipeline_uneven": uneven()}
    for name, picture in pictures.items():
        picture.write_svg(folder / f"{name}.svg")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
