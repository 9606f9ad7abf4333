"""Seconds over bytes: where messages are waited for, and where bytes are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from ..specs.units import binary, seconds
from .palette import INK, LINES, PALE
from .picture import Picture

Samples = Sequence[tuple[float, float]]  # (bytes, seconds)
STYLES: tuple = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 3)))
MARKS = "osD^vX"


def latency(curves: Mapping[str, Samples], points: Mapping[str, Samples] | None = None, title: str = "",
            marks: Mapping[str, float] | None = None) -> Picture:
    """Seconds over bytes, both on log axes: a line for each of the `curves`, a mark for each of the `points`.

    Both are [(bytes, seconds), …] by name: what is predicted and what was measured. The same name has the same colour.
    `marks` names sizes in bytes, a crossover for instance: {"crossover": 2.0e6}. Raises ValueError where there is
    nothing to draw, where something is not above 0, and on more than six names.
    """
    points, marks = points or {}, marks or {}
    names = list(dict.fromkeys([*curves, *points]))
    columns = 2 if len(names) == 4 else 3
    _check(names, [*curves.items(), *points.items()], marks)
    figure = Picture(figsize=(6.4, 4.2 + 0.3 * -(-len(names) // columns)), layout="constrained")
    axes = figure.subplots()
    for i, name in enumerate(names):
        for samples, line in ((curves.get(name), _line(i)), (points.get(name), _line(i, solid=False, mark=True))):
            if samples:
                line.set_data(*zip(*sorted(samples), strict=True))
                axes.add_line(line)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.autoscale_view()
    for i, (label, nbytes) in enumerate(marks.items()):
        axes.axvline(nbytes, color=INK, linewidth=1.6, linestyle="--")
        left = axes.transAxes.inverted().transform(axes.transData.transform((nbytes, 1)))[0] > 0.4  # there is more room
        axes.annotate(label, (nbytes, 0.98 - 0.09 * i), (-6 if left else 6, 0), ("data", "axes fraction"),
                      "offset points", ha="right" if left else "left", va="top", fontsize=14, color=INK)
    _finish(axes, title)
    figure.legend([_line(i, name in curves, name in points) for i, name in enumerate(names)], names, ncols=columns,
                  loc="outside lower left", frameon=False, fontsize=14, labelcolor=INK, handlelength=2.4)
    return figure


def _line(i: int, solid: bool = True, mark: bool = False) -> Line2D:
    """How the name of that number is drawn: with a line, if `solid`, with marks."""
    return Line2D([], [], color=LINES[i], linewidth=2.6, linestyle=STYLES[i] if solid else "none",
                  marker=MARKS[i] if mark else "", markersize=8)


def _check(names: Sequence[str], given: Sequence[tuple[str, Samples]], marks: Mapping[str, float]) -> None:
    if not any(samples for _, samples in given):
        raise ValueError("nothing to draw: give curves or points as {name: [(bytes, seconds), …]}")
    if len(names) > len(LINES):
        raise ValueError(f"{len(names)} names can't be told apart by colour: draw {len(LINES)} at most in one picture")
    for name, samples in given:
        if wrong := [pair for pair in samples if min(pair) <= 0]:
            raise ValueError(f"{name}: {wrong[0][0]:g} bytes in {wrong[0][1]:g} s have no place on log axes: both must "
                             "be above 0")
    for label, nbytes in marks.items():
        if nbytes <= 0:
            raise ValueError(f"mark {label!r}: {nbytes:g} bytes have no place on a log axis")


def _finish(axes: Axes, title: str) -> None:
    """Axes that say 1 KiB and 10 µs, with few lines."""
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: binary(round(n), 3)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda s, _: seconds(s)))
    axes.xaxis.set_major_locator(LogLocator(base=2**5))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.tick_params(labelsize=14, labelcolor=INK, length=0)
    axes.grid(color="white", linewidth=1.2)
    axes.set_axisbelow(True)
    axes.set_facecolor(PALE)
    axes.spines[:].set_visible(False)
    if title:
        axes.set_title(title, loc="left", color=INK, fontsize=16)
