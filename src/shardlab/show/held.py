"""What is held, drawn to scale: sizes laid over cards, and what they are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from ..specs import CardSpec
from ..specs.units import decimal
from .palette import HELD, INK
from .picture import Picture

LINE = 8  # cards a line, as many as the usual server has


def over_cards(sizes: Mapping[str, int], card: CardSpec) -> Picture:
    """Bytes laid over cards, by name: an outline a card of `card.memory`, filled as far as the bytes reach.

    Eight cards a line. Raises ValueError on sizes that are not above 0.
    """
    if wrong := [name for name, nbytes in sizes.items() if nbytes <= 0]:
        raise ValueError(f"{wrong[0]}: {sizes[wrong[0]]} bytes can't be laid over cards: give a size above 0")
    lines = sum(-(-nbytes // (LINE * card.memory)) for nbytes in sizes.values())
    figure = Picture(figsize=(6.4, 0.62 * (lines + len(sizes))), layout="constrained")
    axes = figure.subplots()
    y = 0.0
    for name, nbytes in sizes.items():
        cards = -(-nbytes // card.memory)
        axes.text(0, y - 0.32, f"{name}: {decimal(nbytes, 4)}", fontsize=15, color=INK, va="center")
        y -= 0.7
        for i in range(cards):
            filled = min(1.0, (nbytes - i * card.memory) / card.memory)
            corner = (i % LINE, y - 0.8 - i // LINE)
            axes.add_patch(Rectangle(corner, 0.86 * filled, 0.8, facecolor=HELD["weights"]))
            axes.add_patch(Rectangle(corner, 0.86, 0.8, facecolor="none", edgecolor=INK, linewidth=1.6))
        y -= -(-cards // LINE) + 0.1
    axes.set_xlim(-0.05, LINE)
    axes.set_ylim(y, 0)
    axes.set_axis_off()
    return figure


def stacked(bars: Mapping[str, Mapping[str, float]], unit: str, mark: tuple[str, float] | None = None) -> Picture:
    """A bar for each name, made of kinds (`palette.HELD`) in so many `unit`, its sum behind it; `mark` names a line.

    A kind is written on the bar where there is room, and in the legend. Raises ValueError where there is no bar.
    """
    if not bars:
        raise ValueError("no bars: give at least one name with its parts")
    figure = Picture(figsize=(6.4, 1.3 + 0.95 * len(bars)), layout="constrained")
    axes = figure.subplots()
    longest = max([sum(parts.values()) for parts in bars.values()] + ([mark[1]] if mark else []))
    for i, (name, parts) in enumerate(bars.items()):
        axes.text(0, i - 0.36, name, fontsize=15, color=INK, va="bottom")
        _bar(axes, i, parts, longest, unit)
    if mark:
        axes.plot([mark[1]] * 2, [-0.4, len(bars) - 0.4], color=INK, linewidth=2, linestyle="--")
        axes.text(mark[1], len(bars) - 0.35, mark[0], fontsize=15, color=INK, ha="center", va="top")
    kinds = [kind for kind in HELD if any(kind in parts for parts in bars.values())]
    _legend(figure, kinds)
    axes.set_xlim(0, 1.2 * longest)
    axes.set_ylim(len(bars) - (0.1 if mark else 0.5), -0.75)
    axes.set_axis_off()
    return figure


def _bar(axes: Axes, row: int, parts: Mapping[str, float], longest: float, unit: str) -> None:
    left = 0.0
    for kind, value in parts.items():
        axes.barh(row, value, left=left, height=0.6, color=HELD[kind], edgecolor="white", linewidth=1.5)
        if value > 0.08 * longest:
            axes.text(left + value / 2, row, f"{value:,.3g}", ha="center", va="center", fontsize=15, weight="bold",
                      color=INK if HELD[kind] == HELD["buffers"] else "white")
        left += value
    axes.text(left + 0.015 * longest, row, f"{left:,.4g} {unit}", fontsize=15, color=INK, va="center")


def _legend(figure: Picture, kinds: Sequence[str]) -> None:
    patches = [Rectangle((0, 0), 1, 1, facecolor=HELD[kind], label=kind) for kind in kinds]
    figure.legend(handles=patches, loc="outside lower left", ncols=3, frameon=False, fontsize=14, handlelength=1,
                  columnspacing=1.2, labelcolor=INK)
