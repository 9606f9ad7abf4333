"""A pipeline's bill, line by line: ranks that hold and send the same, one after the other, in one."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from ..specs.units import count, decimal
from .bill import Row

if TYPE_CHECKING:
    from .pipeline import PipelineBill, RankBill


def rows_of(bill: PipelineBill) -> list[Row]:
    """Of each rank states, activations, messages and the sum; then the largest, and what all send."""
    rows: list[Row] = []
    for _, alike in groupby(bill.ranks, key=_same):
        rows += _rank(bill, list(alike))
    largest, sent = bill.largest, sum(each.forward + each.backward for each in bill.ranks)
    messages = sum(each.messages for each in bill.ranks)
    each = bill.axis.saved.stream().derivation
    return [*rows, Row("largest", f"rank {largest.rank}", largest.held),
            Row("all hops", f"{messages:,} messages × {each}", sent)]


def _same(rank: RankBill) -> tuple:
    """What ranks have in common whose rows are the same."""
    stages = [(len(each.stage.layers), each.stage.first, each.stage.last, each.kept, each.put_off,
               rank.live.get(each.stage.number), rank.late.get(each.stage.number)) for each in rank.stages]
    return stages, rank.parameters, rank.gradients, rank.states, rank.peak, rank.forward, rank.backward


def _rank(bill: PipelineBill, alike: list[RankBill]) -> list[Row]:
    first, last = alike[0], alike[-1]
    name = f"rank {first.rank}" if len(alike) == 1 else f"ranks {first.rank}–{last.rank}, each"
    what = "; ".join(each.stage.what for each in first.stages) if len(alike) == 1 else _layers(first)
    trained = bill.axis.trains
    note = (f"weights {decimal(first.weights)}, gradients {decimal(first.gradients)}, states {decimal(first.states)}"
            if trained else "")
    rows = [Row(f"{name}: states" if trained else f"{name}: weights", f"{what}: {count(first.parameters)} params",
                first.weights + first.gradients + first.states, note=note)]
    if trained:
        more = first.peak - first.activations
        rows.append(Row("  activations", _kept(first), first.activations,
                        note=f"within a pass {decimal(more)} more" if more else ""))
    hops = first.forward // bill.hop, first.backward // bill.hop
    ways = [f"{n} {way}" for n, way in zip(hops, ("forward", "backward"), strict=True) if n]
    return [*rows, Row("  sends", " + ".join(ways) or "nothing", first.forward + first.backward,
                       note=f"hop {decimal(bill.hop)}")]


def _layers(rank: RankBill) -> str:
    n = sum(len(each.stage.layers) for each in rank.stages)
    return f"{n} layer{'s' * (n != 1)}"


def _kept(rank: RankBill) -> str:
    """Micro-batches × bytes, stage by stage: "4 × 12.3 MB + 3 × 10 MB, weight gradients to come"."""
    bytes_of = {each.stage.number: each for each in rank.stages}
    parts = [f"{n} × {decimal(bytes_of[s].kept)}" for s, n in rank.live.items()]
    parts += [f"{n} × {decimal(bytes_of[s].put_off)} put off" for s, n in rank.late.items()]
    return " + ".join(parts) or "nothing"
