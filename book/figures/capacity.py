"""Draw the figures of chapter 12: where a server comes to rest, and an hour whose mean says that all is well.

`python book/figures/capacity.py [FOLDER]` writes capacity_point.svg and capacity_hour.svg.
"""

import sys
from pathlib import Path

from matplotlib.axes import Axes

from shardlab.cost import serve_step, steady
from shardlab.serve.first_come import first_come, prompt_seconds
from shardlab.serve.workload import afternoon
from shardlab.show.latency import STYLES
from shardlab.show.palette import INK, LINES
from shardlab.show.picture import Picture
from shardlab.specs import ClusterSpec, Layout, find_model

STEP = serve_step(find_model("llama-3.1-70b"), Layout(tp=8), ClusterSpec.of("h100", 8), sync=29e-6)
PROMPT, ANSWER, MOST = 1155, 211, 1000
CONTEXT, RATES = PROMPT + (ANSWER + 1) // 2, (5, 10, 13, 16)


def quiet(axes: Axes) -> None:
    axes.tick_params(labelsize=14, colors=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)


def inside(rate: float, batch: int) -> float:
    """How many requests are inside, if a token of each takes as long as it does with `batch` at once: λ · O · TPOT."""
    return rate * ANSWER * STEP([(1, CONTEXT)] * batch) / (1 - rate * STEP([(PROMPT, PROMPT)]))


def point() -> Picture:
    """Requests inside over the batch that a token's time is taken from, for four rates; where they are equal."""
    figure = Picture(figsize=(6.4, 4.9), layout="constrained")
    axes = figure.subplots()
    top, batches = 300, [1, *range(10, 301, 10)]
    axes.plot([0, top], [0, top], color=INK, linewidth=1.2, linestyle=":")
    axes.text(268, 276, "equal", fontsize=14, color=INK, ha="right", va="bottom")
    for i, rate in enumerate(RATES):
        values = [inside(rate, n) for n in batches]
        axes.plot(batches, values, color=LINES[i], linestyle=STYLES[i], linewidth=2.6, label=f"{rate} requests/s")
        rest = steady(rate, ANSWER, STEP, context=CONTEXT, most=MOST, prefill=STEP([(PROMPT, PROMPT)]))
        if rest.batch is not None:
            axes.plot([rest.batch], [rest.batch], "o", color=LINES[i], markersize=10, zorder=4)
    axes.set_xlim(0, top)
    axes.set_ylim(0, top)
    axes.set_xlabel("requests at once, B", fontsize=14, color=INK)
    axes.set_ylabel("λ · O · TPOT(B)", fontsize=14, color=INK)
    quiet(axes)
    figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=14, labelcolor=INK)
    return figure


def minutes() -> tuple[list[float], list[float]]:
    """Of each minute of the hour: how much work comes in it, in minutes, and the mean time to first token of those who
    come, in seconds."""
    requests = afternoon(1000)
    takes = prompt_seconds([len(request.prompt) for request in requests])
    arrivals = [request.arrival for request in requests]
    waits = first_come(arrivals, takes)
    asked = [[i for i, arrival in enumerate(arrivals) if 60 * m <= arrival < 60 * m + 60] for m in range(60)]
    return ([sum(takes[i] for i in those) / 60 for those in asked],
            [sum(waits[i] + takes[i] for i in those) / len(those) for those in asked])


def hour() -> Picture:
    """The load of each minute, and below it what those wait who come in it."""
    loads, firsts = minutes()
    figure = Picture(figsize=(6.4, 5.4), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True)
    upper.bar(range(60), loads, width=0.85, align="edge",
              color=[LINES[1] if load > 1 else LINES[0] for load in loads])
    upper.axhline(1, color=INK, linewidth=1.2, linestyle="--")
    upper.text(1, 1.04, "all that one server does", fontsize=14, color=INK, va="bottom")
    upper.set_ylim(0, 1.35)
    upper.set_ylabel("work, s a second", fontsize=14, color=INK)
    lower.plot([m + 0.5 for m in range(60)], firsts, color=LINES[1], linewidth=2.8)
    lower.set_ylim(0, 30)
    lower.set_ylabel("first token, s", fontsize=14, color=INK)
    lower.set_xlabel("minute of the hour", fontsize=14, color=INK)
    lower.set_xlim(0, 60)
    for axes in (upper, lower):
        quiet(axes)
    return figure


def draw(folder: Path) -> None:
    """Write both pictures into `folder`."""
    point().write_svg(folder / "capacity_point.svg")
    hour().write_svg(folder / "capacity_hour.svg")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
