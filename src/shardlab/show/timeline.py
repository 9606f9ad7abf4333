"""A ledger as a picture: what each rank was waiting for, and when."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.patches import Patch

from .palette import AXES, INK, PALE
from .picture import Picture


def timeline(entries: Sequence[dict], title: str = "") -> Picture:
    """A row for each rank, a bar for each collective from the call to its end, in its axis's colour.

    `entries` are the dictionaries of `Ledger.to_dicts()`, of any number of ranks. Bars of backward are hatched. Time is
    in milliseconds from the first start. Raises ValueError on an empty ledger.
    """
    if not entries:
        raise ValueError("an empty ledger has no timeline: record some collectives first")
    ranks = sorted({e["rank"] for e in entries})
    zero = min(e["start"] for e in entries)
    figure = Picture(figsize=(6.4, 1.2 + 0.42 * len(ranks)), layout="constrained")
    axes = figure.subplots()
    for e in entries:
        back = e["phase"] == "backward"
        axes.barh(ranks.index(e["rank"]), 1e3 * (e["end"] - e["start"]), left=1e3 * (e["start"] - zero), height=0.7,
                  color=AXES.get(e["axis"], AXES["world"]).colour, hatch="////" if back else None,
                  edgecolor="white" if back else "none", linewidth=0)
    axes.set_yticks(range(len(ranks)), [f"rank {r}" for r in ranks])
    axes.invert_yaxis()
    axes.set_facecolor(PALE)
    axes.set_xlabel("ms", color=INK)
    axes.set_title(title, loc="left", color=INK, fontsize=13)
    axes.spines[:].set_visible(False)
    used = sorted({(e["axis"], e["phase"]) for e in entries}, key=lambda pair: (pair[0], pair[1] != "forward"))
    figure.legend(handles=[_patch(axis, phase) for axis, phase in used], loc="outside lower left", ncols=4,
                  frameon=False, fontsize=13)
    return figure


def _patch(axis: str, phase: str) -> Patch:
    back = phase == "backward"
    return Patch(facecolor=AXES.get(axis, AXES["world"]).colour, hatch="////" if back else None,
                 edgecolor="white" if back else "none", label=f"{axis} {phase}")
