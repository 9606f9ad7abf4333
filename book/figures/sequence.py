"""Draw the figures of chapter 8: a sequence on four ranks, keys and values going round, and who computes which scores.

`python book/figures/sequence.py [FOLDER]` writes sequence_cut.svg, sequence_ring.svg and sequence_causal.svg.
"""

import sys
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

from shardlab.parallel.zigzag import places
from shardlab.show.palette import AXES, INK, PALE, ladder, on
from shardlab.show.picture import Picture

RANKS, TOKENS = 4, 8192  # drawn
TINTS, LETTER = ladder(AXES["cp"].colour, RANKS), AXES["cp"].letter


def box(axes: Axes, x: float, y: float, wide: float, high: float, text: str, colour: str, size: int = 15) -> None:
    """A filled rectangle with words in it."""
    axes.add_patch(Rectangle((x, y), wide, high, facecolor=colour, edgecolor="white", linewidth=1))
    axes.text(x + wide / 2, y + high / 2, text, fontsize=size, color=on(colour), ha="center", va="center")


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """From here to there, in ink."""
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=18, linewidth=2.5, color=INK,
                                   shrinkA=0, shrinkB=0))


def cut() -> Picture:
    """A layer on four ranks that have a quarter of the tokens each: in attention alone something is sent."""
    figure = Picture(figsize=(6.4, 4.9), layout="constrained")
    axes = figure.subplots()
    wide, gap = 1.45, 0.4
    rows = (("tokens", 3.55, 0.8), ("norm\nq, k, v", 2.65, 0.8), ("attention", 1.0, 0.8),
            ("out, norm\nfeed-\nforward", -0.35, 1.25))
    for rank in range(RANKS):
        x, own = rank * (wide + gap), TOKENS // RANKS
        axes.text(x + wide / 2, 4.45, f"{LETTER}{rank}", fontsize=16, weight="bold", color=INK, ha="center")
        for name, y, high in rows:
            text = f"{rank * own}–\n{(rank + 1) * own - 1}" if name == "tokens" else name
            box(axes, x, y, wide, high, text, PALE if name[0] in "no" else TINTS[rank])
        if rank:
            arrow(axes, (x - gap, 1.4), (x, 1.4))
    end = RANKS * (wide + gap) - gap
    axes.plot([end, end + 0.25, end + 0.25], [1.4, 1.4, 2.03], color=INK, linewidth=2.5)
    axes.plot([end + 0.25, -0.25, -0.25], [2.03, 2.03, 1.4], color=INK, linewidth=2.5)
    arrow(axes, (-0.25, 1.4), (0, 1.4))
    axes.text(end / 2, 2.1, "keys and values go round", fontsize=15, color=INK, ha="center", va="bottom")
    axes.set_xlim(-0.35, end + 0.35)
    axes.set_ylim(-0.4, 4.85)
    axes.set_axis_off()
    return figure


def ring() -> Picture:
    """Whose keys and values each of four ranks has in each step."""
    figure = Picture(figsize=(6.4, 4.6), layout="constrained")
    axes = figure.subplots()
    wide, high, gap = 1.3, 0.72, 0.42
    for rank in range(RANKS):
        x = rank * (wide + gap)
        box(axes, x, 0.25, wide, high, f"q of {LETTER}{rank}", TINTS[rank])
        axes.text(x + wide / 2, 1.12, f"{LETTER}{rank}", fontsize=16, weight="bold", color=INK, ha="center")
        for step in range(RANKS):
            y, source = -(step + 1) * (high + gap), (rank - step) % RANKS
            box(axes, x, y, wide, high, f"k, v of {LETTER}{source}", TINTS[source], 14)
            if step < RANKS - 1 and rank < RANKS - 1:
                arrow(axes, (x + wide * 0.75, y), (x + wide * 1.25 + gap, y - gap))
    for step in range(RANKS):
        axes.text(-0.2, -(step + 1) * (high + gap) + high / 2, f"step {step + 1}", fontsize=15, color=INK, ha="right",
                  va="center")
    axes.set_xlim(-1.15, RANKS * (wide + gap) - gap + 0.05)
    axes.set_ylim(-RANKS * (high + gap) - 0.05, 1.5)
    axes.set_axis_off()
    return figure


def scores(axes: Axes, title: str, order: torch.Tensor) -> None:
    """The scores of a causal sequence of 2p tokens, each the colour of the rank that has its query."""
    n = order.numel()
    owner = {token: rank for rank, tokens in enumerate(order.tolist()) for token in tokens}
    for query in range(n):
        tint = TINTS[owner[query]]
        for key in range(query + 1):
            axes.add_patch(Rectangle((key, -query - 1), 1, 1, facecolor=tint, edgecolor="white", linewidth=1))
        axes.text(-0.2, -query - 0.5, f"{LETTER}{owner[query]}", fontsize=14, color=INK, ha="right", va="center")
    for rank, tokens in enumerate(order.tolist()):
        share = sum(token + 0.5 for token in tokens) / (n * n / 2)  # a piece on the diagonal is half a square
        y = -n - 1.5 - 1.05 * rank
        axes.add_patch(Rectangle((1.0, y), share * n, 0.8, facecolor=TINTS[rank]))
        axes.text(0.8, y + 0.4, f"{LETTER}{rank}", fontsize=14, color=INK, ha="right", va="center")
        axes.text(1.2 + share * n, y + 0.4, f"{share:.0%}", fontsize=14, color=INK, ha="left", va="center")
    axes.text(n / 2, 0.3, title, fontsize=16, color=INK, ha="center")
    axes.set_xlim(-1.3, n + 0.1)
    axes.set_ylim(-n - 1.6 - 1.05 * (len(order) - 1), 1.2)
    axes.set_aspect("equal")
    axes.set_axis_off()


def causal() -> Picture:
    """Who computes which scores, in pieces one after the other and in zigzag."""
    figure = Picture(figsize=(6.4, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    scores(left, "plain", torch.arange(2 * RANKS).view(RANKS, 2))
    scores(right, "zigzag", places(2 * RANKS, RANKS))
    return figure


def draw(folder: Path) -> None:
    """Write all pictures into `folder`."""
    for name, picture in (("cut", cut()), ("ring", ring()), ("causal", causal())):
        picture.write_svg(folder / f"sequence_{name}.svg")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
