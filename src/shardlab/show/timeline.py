"""A ledger as a picture: what each rank was waiting for, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from .palette import AXES, INK, PALE
from .picture import Picture

SECOND = "#BBBBBB"  # every other message


def timeline(entries: Sequence[dict], title: str = "", marks: Mapping[int, float] | None = None) -> Picture:
    """A row for each rank, a bar for each collective from the call to its end, in its axis's colour.

    `entries` are the dictionaries of `Ledger.to_dicts()`, of any number of ranks. Bars of backward are hatched. Those
    that are under way at a time, from an `async_op=True` call until somebody has waited for it, lie below one another.
    Where messages are known, thin bars below are those that the rank has sent, dark and pale by turns, each until it
    was gone. `marks` has moments by rank, on the host's monotonic clock as all times are: lines across the ranks' rows.
    The axis is in milliseconds from the first start. Raises ValueError on an empty ledger.
    """
    if not entries:
        raise ValueError("an empty ledger has no timeline: record some collectives first")
    ranks = sorted({e["rank"] for e in entries})
    zero = min(e["start"] for e in entries)
    thin = 0.18 if any(e.get("messages") for e in entries) else 0.0
    lanes = [_lanes([e for e in entries if e["rank"] == rank]) for rank in ranks]
    tall = max(0.6 if thin else 0.42, 0.11 * max(map(len, lanes)))  # inches of a row
    figure = Picture(figsize=(6.4, 1.2 + tall * len(ranks)), layout="constrained")
    axes = figure.subplots()
    for row, own in enumerate(lanes):
        height = (0.7 - thin) / len(own)
        for lane, inside in enumerate(own):
            for e in inside:
                _bar(axes, e, zero, row - 0.35 + (lane + 0.5) * height, height * (0.8 if len(own) > 1 else 1))
                for i, m in enumerate(e.get("messages", ())):
                    axes.barh(row + 0.35 - thin / 2, 1e3 * (m["end"] - m["start"]), left=1e3 * (m["start"] - zero),
                              height=thin, color=(INK, SECOND)[i % 2], linewidth=0)
    for rank, moment in (marks or {}).items():
        row = ranks.index(rank)
        axes.plot(2 * [1e3 * (moment - zero)], [row - 0.42, row + 0.42], color=INK, linewidth=2)
    axes.set_yticks(range(len(ranks)), [f"rank {r}" for r in ranks])
    axes.invert_yaxis()
    axes.set_facecolor(PALE)
    axes.set_xlabel("ms", color=INK, fontsize=14)
    axes.tick_params(labelsize=14, labelcolor=INK, length=0)
    axes.set_title(title, loc="left", color=INK, fontsize=13)
    axes.spines[:].set_visible(False)
    used = sorted({(e["axis"], e["phase"]) for e in entries}, key=lambda pair: (pair[0], pair[1] != "forward"))
    figure.legend(handles=[_patch(axis, phase) for axis, phase in used], loc="outside lower left", ncols=4,
                  frameon=False, fontsize=13)
    return figure


def _lanes(entries: Sequence[dict]) -> list[list[dict]]:
    """The entries of a rank in as few lanes as will do without one over another, each lane in time's order."""
    lanes: list[list[dict]] = []
    for e in sorted(entries, key=lambda e: e["start"]):
        lane = next((each for each in lanes if each[-1]["end"] <= e["start"]), None)
        if lane is None:
            lanes.append(lane := [])
        lane.append(e)
    return lanes


def _bar(axes: Axes, e: dict, zero: float, y: float, height: float) -> None:
    back = e["phase"] == "backward"
    axes.barh(y, 1e3 * (e["end"] - e["start"]), left=1e3 * (e["start"] - zero), height=height,
              color=AXES.get(e["axis"], AXES["world"]).colour, hatch="////" if back else None,
              edgecolor="white" if back else "none", linewidth=0)


def _patch(axis: str, phase: str) -> Patch:
    back = phase == "backward"
    return Patch(facecolor=AXES.get(axis, AXES["world"]).colour, hatch="////" if back else None,
                 edgecolor="white" if back else "none", label=f"{axis} {phase}")
