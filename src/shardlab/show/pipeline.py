"""A pipeline in time: which rank computes what when, as a schedule predicts it and as a ledger has recorded it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from ..cost import Timeline
from ..schedule import Span
from .palette import AXES, INK, WORK, on
from .picture import Picture

WIDTH, ROW, HEAD, FOOT, LEGEND = 6.4, 0.36, 0.34, 0.42, 0.32  # inches: the picture, a row, a title, axis, legend
LEFT, RIGHT = 0.44, 0.12  # inches beside the rows, for the ranks' names
SIZE = 14  # points
TALL = 0.86 * ROW  # of a row is drawn
KINDS = {"F": "forward", "B": "backward", "I": "backward", "W": "weight gradient"}
PALEST = 0.55  # how far the last of a rank's stages is from its colour to white

Case = Timeline | Sequence[Sequence[Span]] | Sequence[Mapping]


class Box(NamedTuple):
    """A pass of a rank: its times are from the first start of all ranks, `shade` is the place of its stage among the
    rank's own, `half` 0 where it fills the row, 1 and 2 above and below another that runs at the same time."""

    rank: int
    kind: str
    microbatch: int
    start: float
    end: float
    shade: float
    half: int


def pipeline(cases: Mapping[str, Case], unit: str = "", scale: float = 1.0) -> Picture:
    """A block for each case, one above the other on one axis: a row for each rank, a box for each pass, grey is idle.

    A case is a `cost.timeline`, the spans of a `schedule.clock`, or works of a ledger as dictionaries (kind, stage,
    microbatch, rank, start, end). In a box is its micro-batch, where there is room. Of a rank's stages the first has
    the full colour, the next ones lighter ones. Two that run as a pair share the row. The axis has times × `scale`, in
    `unit`. Raises ValueError where there is nothing to draw.
    """
    told = {name: boxes(case) for name, case in cases.items()}
    if not told or not all(told.values()):
        raise ValueError("no pass in a case, so there is nothing to draw: record ledgers around execute.run")
    ranks = {name: 1 + max(box.rank for box in mine) for name, mine in told.items()}
    longest = max(box.end for mine in told.values() for box in mine)
    if not longest > 0:
        raise ValueError("every pass takes 0 s, so there is nothing to draw")
    height = sum(HEAD + ROW * n for n in ranks.values()) + FOOT + LEGEND
    figure = Picture(figsize=(WIDTH, height))
    wide = WIDTH - LEFT - RIGHT
    axes = figure.add_axes((LEFT / WIDTH, (LEGEND + FOOT) / height, wide / WIDTH, 1 - (LEGEND + FOOT) / height))
    top = 0.0
    for name, mine in told.items():
        axes.text(-LEFT / wide * longest, top + HEAD / 2 + 0.02, name, fontsize=SIZE + 1, color=INK, va="center")
        top += HEAD
        total = max(box.end for box in mine)
        for rank in range(ranks[name]):
            axes.add_patch(Rectangle((0, top + ROW * rank), total, TALL, facecolor=WORK["idle"], linewidth=0))
            _row(axes, top + ROW * rank, [box for box in mine if box.rank == rank], wide / longest)
            axes.text(-0.07 * longest / wide, top + ROW * (rank + 0.5), f"{AXES['pp'].letter}{rank}", fontsize=SIZE,
                      color=INK, ha="right", va="center")
        top += ROW * ranks[name]
    axes.set_xlim(0, longest)
    axes.set_ylim(top, 0)
    _finish(figure, axes, [box for mine in told.values() for box in mine], unit, scale)
    return figure


def boxes(case: Case) -> list[Box]:
    """The passes of a case, from 0 on, in the order of ranks and of their starts."""
    works = sorted(_works(case), key=lambda work: (work[0], work[4], work[5]))
    zero = min((start for *_, start, _ in works), default=0.0)
    stages: dict[int, list[int]] = {}
    for rank in sorted({work[0] for work in works}):
        stages[rank] = sorted({work[2] for work in works if work[0] == rank})
    most = max(map(len, stages.values()), default=1)
    out = []
    for i, (rank, kind, stage, microbatch, start, end) in enumerate(works):
        near = [works[j] for j in (i - 1, i + 1) if 0 <= j < len(works)]
        paired = any(other[0] == rank and other[4:] == (start, end) and end > start for other in near)
        half = (1 if kind == "F" else 2) if paired else 0
        shade = PALEST * stages[rank].index(stage) / max(1, most - 1)
        out.append(Box(rank, kind, microbatch, start - zero, end - zero, shade, half))
    return out


def _works(case: Case) -> Iterator[tuple[int, str, int, int, float, float]]:
    """(rank, kind, stage, micro-batch, start, end) of each pass, whatever tells them."""
    for i, each in enumerate(case.spans if isinstance(case, Timeline) else case):
        if isinstance(each, Mapping):
            yield each["rank"], each["kind"], each["stage"], each["microbatch"], each["start"], each["end"]
        else:
            for action, start, end in each:
                yield i, action.kind, action.stage, action.microbatch, start, end


def colour_of(kind: str, shade: float) -> str:
    """The colour of a kind of work, so far on the way to white."""
    full = WORK[KINDS[kind]]
    return "#" + "".join(f"{round(c + (255 - c) * shade):02X}" for c in bytes.fromhex(full[1:]))


def _row(axes: Axes, y: float, mine: Sequence[Box], inches: float) -> None:
    """A rank's passes; `inches` is how wide a second is."""
    for box in mine:
        low, tall = (y, TALL) if not box.half else (y + (box.half - 1) * TALL / 2, TALL / 2)
        colour, length = colour_of(box.kind, box.shade), box.end - box.start
        axes.add_patch(Rectangle((box.start, low), length, tall, facecolor=colour, edgecolor="white", linewidth=0.7))
        text = f"{box.microbatch}"
        if not box.half and length * inches > (0.62 * len(text) + 0.1) * SIZE / 72:
            axes.text(box.start + length / 2, low + tall / 2, text, fontsize=SIZE, color=on(colour), ha="center",
                      va="center_baseline")


def _finish(figure: Picture, axes: Axes, drawn: Sequence[Box], unit: str, scale: float) -> None:
    axes.xaxis.set_major_formatter(lambda value, _: f"{value * scale:g}")
    axes.locator_params(axis="x", nbins=7)
    axes.set_yticks([])
    axes.tick_params(axis="x", labelsize=SIZE, labelcolor=INK, length=3, color=INK)
    axes.spines[:].set_visible(False)
    figure.text(1 - RIGHT / WIDTH, 0.06 / figure.get_figheight(), unit, fontsize=SIZE, color=INK, ha="right",
                va="bottom")
    used = dict.fromkeys(KINDS[box.kind] for box in sorted(drawn, key=lambda box: box.kind == "W"))
    patches = [Patch(facecolor=WORK[kind], label=kind) for kind in [*used, "idle"]]
    figure.legend(handles=patches, loc="lower left", ncols=4, bbox_to_anchor=(0, 0), frameon=False, fontsize=SIZE,
                  handlelength=1, handletextpad=0.5, columnspacing=1.1, borderaxespad=0.1, labelcolor=INK)
