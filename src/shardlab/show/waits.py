"""How long requests waited: the share that waited no longer, over seconds, and where the limits are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, PercentFormatter

from ..specs.units import seconds
from .latency import STYLES
from .palette import INK, LINES, PALE
from .picture import Picture

Waits = Mapping[str, Sequence[float]]  # seconds by name, such as Metrics.waits has them
POINTS = 400  # more can't be seen on a line, and make a page heavy


def waits(runs: Mapping[str, Waits], limits: Mapping[str, float] | None = None, title: str = "",
          names: Sequence[str] = ("TTFT", "TPOT")) -> Picture:
    """A panel for each of `names`, with a line for each of the `runs`: {"one server": {"TTFT": [0.1, …], …}, …}.

    A point (t, share) says how many waited t seconds or less; seconds are on a log axis. `limits`, in seconds by name,
    are dashed. A name that no run has is left out. Raises ValueError where there is nothing to draw and on more than
    six runs.
    """
    names = [name for name in names if any(len(of.get(name, ())) for of in runs.values())]
    if not names:
        raise ValueError("nothing to draw: give runs as {name: {'TTFT': [seconds, …], 'TPOT': [seconds, …]}}, such as "
                         "Metrics.waits has them")
    if len(runs) > len(LINES):
        raise ValueError(f"{len(runs)} runs can't be told apart by colour: draw {len(LINES)} at most in one picture")
    figure = Picture(figsize=(6.4, 0.3 * -(-len(runs) // 2) + 2.9 * len(names)), layout="constrained")
    panels = figure.subplots(len(names), squeeze=False)[:, 0]
    for axes, name in zip(panels, names, strict=True):
        for i, (run, of) in enumerate(runs.items()):
            if len(of.get(name, ())):
                axes.step(*_line(of[name]), where="post", color=LINES[i], linestyle=STYLES[i], linewidth=2.2, label=run)
        _finish(axes, name, (limits or {}).get(name))
    if len(runs) > 1:
        lines = [Line2D([], [], color=LINES[i], linestyle=STYLES[i], linewidth=2.2) for i in range(len(runs))]
        figure.legend(lines, list(runs), ncols=2, loc="outside lower left", frameon=False, fontsize=14, labelcolor=INK,
                      handlelength=2.4)
    if title:
        panels[0].set_title(title, loc="left", color=INK, fontsize=16)
    return figure


def _line(values: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Seconds in order, and the share that waited so long or less; a wait of 0, which no log axis has, counts too."""
    ordered, shares = np.sort(values), np.arange(1, len(values) + 1) / len(values)
    keep = np.unique(np.linspace(0, len(values) - 1, min(len(values), POINTS)).round().astype(int))
    keep = keep[ordered[keep] > 0]
    foot = keep[:1]  # it rises from the share before it
    return np.concatenate([ordered[foot], ordered[keep]]), np.concatenate([foot / len(values), shares[keep]])


def _finish(axes: Axes, name: str, limit: float | None) -> None:
    axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    if limit is not None:
        axes.axvline(limit, color=INK, linewidth=1.6, linestyle="--")
        left = axes.transAxes.inverted().transform(axes.transData.transform((limit, 1)))[0] > 0.4  # there is more room
        axes.annotate(f"limit {seconds(limit)}", (limit, 0.05), (-6 if left else 6, 0), ("data", "axes fraction"),
                      "offset points", ha="right" if left else "left", fontsize=14, color=INK)
    axes.set_xlabel(name, fontsize=14, color=INK)
    axes.set_ylabel("share of requests", fontsize=14, color=INK)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda t, _: seconds(t)))
    axes.xaxis.set_major_locator(LogLocator())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.tick_params(labelsize=14, labelcolor=INK, length=0)
    axes.grid(color="white", linewidth=1.2)
    axes.set_axisbelow(True)
    axes.set_facecolor(PALE)
    axes.spines[:].set_visible(False)
