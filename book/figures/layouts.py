"""Draw the figures of chapter 9: ranks in their groups, where a step's seconds go, DeepSeek-V3's cards, and steps as
predicted and as measured.

`python book/figures/layouts.py [FOLDER]` writes layouts_ranks.svg, layouts_time.svg, layouts_v3.svg and
layouts_measured.svg, whose points bench/step_time.py has left in bench/results.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from shardlab.cost import StepTime, step_time
from shardlab.show.palette import AXES, INK, PALE, WORK, ladder, on
from shardlab.show.picture import Picture
from shardlab.specs import ClusterSpec, Layout, find_model

LLAMA, CARDS, SEQ, SEQUENCES = find_model("llama-3.1-70b"), 64, 8192, 64
WIDE, HIGH, GAP = 1.35, 0.95, 0.42  # of a rank's box, and beside it


def ranks() -> Picture:
    """TP2 · DP2 · PP2 on two servers of four: each rank's places, and a line for each group it is in."""
    layout = Layout(tp=2, dp=2, pp=2, microbatches=2)
    figure = Picture(figsize=(6.4, 3.9), layout="constrained")
    axes = figure.subplots()
    corner = {rank: (rank % 4 * (WIDE + GAP), -(rank // 4) * 2.3) for rank in range(layout.world_size)}
    for server in range(2):
        x, y = corner[4 * server]
        axes.add_patch(Rectangle((x - 0.22, y - 0.62), 4 * WIDE + 3 * GAP + 0.44, HIGH + 0.82, facecolor=PALE))
        axes.text(x - 0.12, y + HIGH + 0.26, f"server {server}", fontsize=14, color=INK, va="bottom")
    for rank, (x, y) in corner.items():
        for axis in ("pp", "dp", "tp"):
            other = rank + layout.distance(axis)
            if layout.place(rank)[axis] == 0:
                join(axes, axis, corner[rank], corner[other])
        axes.add_patch(Rectangle((x, y), WIDE, HIGH, facecolor="white", edgecolor=INK, linewidth=1.2, zorder=2))
        axes.text(x + WIDE / 2, y + HIGH - 0.24, f"rank {rank}", fontsize=14, color=INK, ha="center", va="center",
                  zorder=3)
        for i, axis in enumerate(("pp", "dp", "tp")):
            left, name = x + 0.06 + i * (WIDE - 0.12) / 3, f"{AXES[axis].letter}{layout.place(rank)[axis]}"
            axes.add_patch(Rectangle((left, y + 0.06), (WIDE - 0.12) / 3 - 0.03, 0.42, facecolor=AXES[axis].colour,
                                     zorder=3))
            axes.text(left + (WIDE - 0.21) / 6, y + 0.26, name, fontsize=14, weight="bold",
                      color=on(AXES[axis].colour), ha="center", va="center", zorder=4)
    names = {"tp": "shares layers", "dp": "sums gradients", "pp": "hands on"}
    for i, (axis, name) in enumerate(names.items()):
        x = -0.1 + 2.35 * i
        axes.plot([x, x + 0.4], [-3.35, -3.35], color=AXES[axis].colour, linewidth=5, solid_capstyle="butt")
        axes.text(x + 0.5, -3.35, name, fontsize=14, color=INK, va="center")
    axes.set_xlim(-0.3, 4 * WIDE + 3 * GAP + 0.3)
    axes.set_ylim(-3.6, HIGH + 0.75)
    axes.set_axis_off()
    return figure


def join(axes: Axes, axis: str, one: tuple[float, float], other: tuple[float, float]) -> None:
    """A line between two ranks of a group, in the axis's colour: straight, below the boxes, or down to the next row."""
    look = {"color": AXES[axis].colour, "linewidth": 5, "solid_capstyle": "butt", "zorder": 1}
    (x, y), (to, down) = one, other
    if axis == "tp":
        axes.plot([x + WIDE, to], [y + HIGH / 2] * 2, **look)
    elif axis == "dp":
        # two groups lie side by side, one below the other
        low = y - (0.22 if round(x / (WIDE + GAP)) % 2 == 0 else 0.44)
        axes.plot([x + 0.5, x + 0.5, to + 0.5, to + 0.5], [y, low, low, y], **look)
    else:
        axes.plot([x + WIDE - 0.3] * 2, [y, down + HIGH], **look)


def step(layout: Layout, recompute: str | None = None) -> StepTime:
    """A step of the 70B on the drawn cards, a sequence a micro-batch."""
    return step_time(LLAMA, layout, ClusterSpec.of("h100", CARDS), batch=1, seq=SEQ, recompute=recompute)


PARTS: Mapping[str, tuple[tuple[str, ...], str]] = {  # what is drawn together, and how
    "arithmetic": (("arithmetic", "optimizer"), WORK["forward"]),
    "computed again": (("computed again",), WORK["backward"]),
    "tensor axis": (("tensor axis",), AXES["tp"].colour),
    "bubble, imbalance": (("bubble", "imbalance"), WORK["idle"]),
    "data axis": (("data axis",), AXES["dp"].colour),
}


def time() -> Picture:
    """Where the seconds go in five layouts of the same cards."""
    def many(dp: int, **more: object) -> Layout:
        return Layout(dp=dp, microbatches=SEQUENCES // dp, **more)  # type: ignore[arg-type]

    common = {"tp": 8, "pp": 4, "zero": 1, "sp": "again"}
    bills = {"DP64, ZeRO-3, recomputed": step(many(64, zero=3), "full"),
             "TP4, DP16, ZeRO-3": step(many(16, tp=4, zero=3, sp="again")),
             "TP8, PP4, DP2": step(many(2, **common)),
             "PP8, DP8, recomputed": step(many(8, pp=8, zero=1), "full"),
             "TP8, PP4, DP2, wrong order": step(many(2, **common, order="tp-pp-dp"))}
    figure = Picture(figsize=(6.4, 5.2), layout="constrained")
    axes = figure.subplots()
    for i, (name, bill) in enumerate(bills.items()):
        left = 0.0
        axes.text(0, -i + 0.31, name, fontsize=14, color=INK, va="bottom")
        for parts, colour in PARTS.values():
            wide = sum(bill.parts[part] for part in parts)
            axes.add_patch(Rectangle((left, -i - 0.12), wide, 0.4, facecolor=colour))
            left += wide
        axes.text(left + 0.3, -i + 0.08, f"{bill.seconds:.1f} s", fontsize=14, color=INK, va="center")
    axes.set_xlim(0, 33)
    axes.set_ylim(-len(bills) + 0.7, 0.72)
    axes.set_axis_off()
    figure.legend(handles=[Patch(facecolor=colour, label=name) for name, (_, colour) in PARTS.items()],
                  loc="outside lower left", ncols=2, frameon=False, fontsize=14, handlelength=1, labelcolor=INK)
    return figure


def v3() -> Picture:
    """DeepSeek-V3's servers: a row for each stage, two groups of experts, a data axis and a pipeline framed."""
    layout, per_server = Layout(pp=16, dp=128, ep=64, zero=1, microbatches=120), 8
    servers = layout.stage_ranks // per_server
    figure = Picture(figsize=(6.4, 6.2), layout="constrained")
    axes = figure.subplots()
    tints = ladder(AXES["ep"].colour, 3)[:2]
    for rank in range(0, layout.world_size, per_server):
        place = layout.place(rank)
        group = place["dp"] // layout.ep
        axes.add_patch(Rectangle((place["dp"] // per_server, -place["pp"] - 1), 0.9, 0.9, facecolor=tints[group]))
    for stage in range(layout.pp):
        axes.text(-0.25, -stage - 0.55, f"{AXES['pp'].letter}{stage}", fontsize=14, color=INK, ha="right", va="center")
    for group in range(2):
        axes.text(4 + 8 * group, 0.25, "all experts, 64 cards", fontsize=14, color=INK, ha="center")
    frames = {"dp": (-0.1, -6.1, servers + 0.1, 1.1), "pp": (10.9, -layout.pp - 0.1, 1.1, layout.pp + 0.1)}
    for axis, (x, y, wide, high) in frames.items():
        axes.add_patch(Rectangle((x, y), wide, high, facecolor="none", edgecolor=AXES[axis].colour, linewidth=4))
    for i, text in enumerate(("row: data parallelism, 128 cards", "column: eight pipelines, one for each card")):
        axes.text(0, -layout.pp - 0.5 - 0.9 * i, text, fontsize=14, color=INK, va="top")
    axes.set_xlim(-1.5, servers + 0.2)
    axes.set_ylim(-layout.pp - 2.3, 1.1)
    axes.set_aspect("equal")
    axes.set_axis_off()
    return figure


SEEN = Path(__file__).parents[2] / "bench" / "results" / "step_time.json"
AXIS = {"data axis": "dp", "tensor axis": "tp", "context axis": "cp", "bubble": "pp"}


def measured() -> Picture:
    """Each benchmarked step as a point: what was predicted across, what was measured up, and the line where both are
    one. A point has the colour and letter of the axis that costs it most."""
    figure = Picture(figsize=(6.4, 5.4), layout="constrained")
    axes = figure.subplots()
    axes.plot([0.7, 4], [0.7, 4], color=INK, linewidth=1)
    for case in json.loads(SEEN.read_text())["cases"]:
        axis = AXES[AXIS[max(AXIS, key=case["parts"].__getitem__)]]
        axes.plot(case["predicted"], case["measured"], "o", markersize=22, color=axis.colour, alpha=0.9)
        axes.text(case["predicted"], case["measured"], axis.letter, fontsize=14, weight="bold", color=on(axis.colour),
                  ha="center", va="center_baseline")
    axes.set_xlabel("predicted, seconds", fontsize=14, color=INK)
    axes.set_ylabel("measured, seconds", fontsize=14, color=INK)
    axes.tick_params(labelsize=14, colors=INK)
    axes.set_aspect("equal")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    return figure


def draw(folder: Path) -> None:
    """Write all pictures into `folder`."""
    for name, picture in (("ranks", ranks()), ("time", time()), ("v3", v3()), ("measured", measured())):
        picture.write_svg(folder / f"layouts_{name}.svg")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
