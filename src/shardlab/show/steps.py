"""The steps of a collective as pictures: who sends what to whom, and what everybody has then."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

from .contributions import Sent, Step, follow
from .palette import AXES, INK, PALE, ladder, on
from .picture import Picture

WIDTH, NARROWEST = 6.4, 0.58  # inches: of the picture, and from one rank to the next where panels share a line
COLUMN = 0.56  # of that distance is the column itself
HEAD, FOOT = 0.38, 0.38  # inches for a panel's title and for the names of ranks


def steps(entries: Sequence[dict], title: str = "") -> Picture:
    """A panel for each step of one all-reduce, reduce or broadcast that is made of messages.

    `entries` are the dictionaries of `Ledger.to_dicts()`, one of each rank that takes part. A column is a rank, cut
    into the pieces that are sent; an arrow is a message, and one that leaves on the right comes in on the left. The
    number and the shade of a piece say how many ranks' data it holds at the end of the step, an outline that something
    has just come. `contributions.follow` says how that is known. Raises ValueError on other entries.
    """
    told, first = follow(entries), entries[0]
    p, axis = len(first["ranks"]), AXES.get(first["axis"], AXES["world"])
    columns = max(1, min(len(told), int(WIDTH / (NARROWEST * (p + 0.5)))))
    panel = _Panel(told, min(WIDTH / columns, 1.1 * (p + 0.5)) / (p + 0.5), ladder(axis.colour, p)[::-1])
    names = [f"{axis.letter}{r}" for r in range(p)] if first["axis"] in AXES and first["axis"] != "world" else [
        f"rank {r}" if r == first["ranks"][0] else f"{r}" for r in first["ranks"]]
    above, below = 0.4 if title else 0.0, 0.34
    lines = -(-len(told) // columns)
    height = above + lines * panel.height + below
    figure = Picture(figsize=(WIDTH, height))
    for i, step in enumerate(told):
        x, y = WIDTH / columns * (i % columns), height - above - panel.height * (1 + i // columns)
        axes = figure.add_axes((x / WIDTH, y / height, panel.width / WIDTH, panel.height / height))
        panel.draw(axes, step, f"step {i + 1}", names)
    if title:
        figure.text(0.02, 1 - 0.06 / height, title, fontsize=16, color=INK, va="top", weight="bold")
    figure.text(0.02, 0.08 / height, "in a piece: how many ranks' data it holds", fontsize=14, color=INK, va="bottom")
    return figure


class _Panel:
    """What all panels of a picture have in common; lengths are inches, with 0 at rank 0 and at the columns' feet."""

    def __init__(self, told: Sequence[Step], pitch: float, tints: list[str]):
        self.pitch, self.tints = pitch, tints
        self.piece = max(0.3, 0.6 / len(told[0].held[0]))
        self.top = self.piece * len(told[0].held[0])
        p = len(tints)  # in a ring the last rank's right neighbour is the first
        self.round = p > 2 and all(m.dst == (m.src + 1) % p for step in told for m in step.sent)
        leaps = [m.dst - m.src for step in told for m in step.sent if not self.straight(m)]
        self.over, self.under = (self.rise(max([0, *leaps])), self.rise(-min([0, *leaps])))
        self.width = pitch * (len(tints) + 0.5)
        self.height = FOOT + self.under + self.top + self.over + HEAD

    def rise(self, ranks: int) -> float:
        """How far an arc over so many ranks stands off the columns."""
        return 0.16 * ranks * self.pitch + 0.05 if ranks else 0.0

    def straight(self, m: Sent) -> bool:
        """Whether there is no column between its ends: it is an arrow from piece to piece, not an arc."""
        return abs(m.src - m.dst) == 1 or self.round

    def draw(self, axes: Axes, step: Step, title: str, names: list[str]) -> None:
        for r, pieces in enumerate(step.held):
            for i, whose in enumerate(pieces):
                self.box(axes, r, i, len(whose))
            axes.text(r * self.pitch, -self.under - 0.06, names[r], fontsize=14, color=INK, ha="center", va="top")
        for m in step.sent:
            half = COLUMN * self.pitch / 2
            axes.add_patch(Rectangle((m.dst * self.pitch - half, self.top - m.last * self.piece), 2 * half,
                                     (m.last - m.first) * self.piece, facecolor="none", edgecolor=INK, linewidth=2.2))
            self.arrow(axes, m, step)
        left = -0.75 * self.pitch
        axes.text(left + 0.12, self.top + self.over + HEAD - 0.06, title, fontsize=15, color=INK, va="top")
        axes.set_xlim(left, left + self.width)
        axes.set_ylim(-self.under - FOOT, self.top + self.over + HEAD)
        axes.set_axis_off()

    def box(self, axes: Axes, r: int, i: int, count: int) -> None:
        """A piece with the number of ranks whose data it holds; empty, where a broadcast has not come yet."""
        width, low = COLUMN * self.pitch, self.top - (i + 1) * self.piece
        tint = self.tints[count - 1] if count else PALE
        axes.add_patch(Rectangle((r * self.pitch - width / 2, low), width, self.piece, facecolor=tint,
                                 edgecolor="white", linewidth=1.2))
        if count:
            axes.text(r * self.pitch, low + self.piece / 2 - 0.01, f"{count}", fontsize=14, weight="bold", ha="center",
                      va="center_baseline", color=on(tint))

    def arrow(self, axes: Axes, m: Sent, step: Step) -> None:
        half, side = COLUMN * self.pitch / 2, 1 if m.dst > m.src else -1
        if not self.straight(m):  # to the right over the columns, to the left under them
            y = self.top if side > 0 else 0.0
            _arrow(axes, (m.src * self.pitch, y), (m.dst * self.pitch, y), "arc3,rad=-0.3")
            return
        back = any((o.src, o.dst) == (m.dst, m.src) and o.first < m.last and m.first < o.last for o in step.sent)
        y = self.top - (m.first + m.last) / 2 * self.piece + (0.09 * side if back else 0)
        if self.round and side < 0:
            _arrow(axes, (m.src * self.pitch + half, y), ((m.src + 0.73) * self.pitch, y), style="-")
            _arrow(axes, (-0.73 * self.pitch, y), (-half, y))
        else:
            _arrow(axes, (m.src * self.pitch + side * half, y), (m.dst * self.pitch - side * half, y))


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], bend: str = "arc3",
           style: str = "-|>") -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle=style, connectionstyle=bend, mutation_scale=11, linewidth=1.8,
                                   shrinkA=0, shrinkB=0, color=INK, zorder=3))
