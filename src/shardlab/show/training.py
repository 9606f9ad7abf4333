"""A run as its log tells it: the loss over the steps, and below it how fast they went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from .latency import STYLES
from .palette import INK, LINES, PALE
from .picture import Picture

Log = Sequence[Mapping[str, Any]]  # one object a step: "step", "loss", "tokens_per_second"


def training(runs: Mapping[str, Log], title: str = "", loss: str = "loss, nats a token") -> Picture:
    """Loss and tokens a second over steps, a line for each of the `runs` by name: {"tp = 2": log.read(path)}.

    A step whose loss was not finite, null in a log, leaves a gap. Raises ValueError where there is nothing to draw and
    on more than six runs.
    """
    if not any(runs.values()):
        raise ValueError("nothing to draw: give runs as {name: [{'step': 0, 'loss': 5.5, …}, …]}, such as log.read "
                         "gives them")
    if len(runs) > len(LINES):
        raise ValueError(f"{len(runs)} runs can't be told apart by colour: draw {len(LINES)} at most in one picture")
    figure = Picture(figsize=(6.4, 5.0), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    for i, (name, log) in enumerate(runs.items()):
        steps = [each["step"] for each in log]
        for axes, key in ((above, "loss"), (below, "tokens_per_second")):
            values = [float("nan") if each[key] is None else each[key] for each in log]
            axes.plot(steps, values, color=LINES[i], linestyle=STYLES[i], linewidth=2.2, label=name,
                      marker="o" if len(log) == 1 else "")
    _finish(above, loss)
    _finish(below, "tokens a second")
    below.set_ylim(bottom=0)
    below.set_xlabel("step", fontsize=14, color=INK)
    if len(runs) > 1:
        above.legend(frameon=False, fontsize=14, labelcolor=INK, handlelength=2.4)
    if title:
        above.set_title(title, loc="left", color=INK, fontsize=16)
    return figure


def _finish(axes: Axes, label: str) -> None:
    axes.set_ylabel(label, fontsize=14, color=INK)
    axes.tick_params(labelsize=14, labelcolor=INK, length=0)
    axes.grid(color="white", linewidth=1.2)
    axes.set_axisbelow(True)
    axes.set_facecolor(PALE)
    axes.spines[:].set_visible(False)
