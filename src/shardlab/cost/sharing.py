"""What ZeRO leaves on a rank: the numbers of weights, gradients and states that it holds (arXiv:1910.02054, §5).

Exact, padding included, for `parallel.zero.shard`. Rows are cut evenly wherever parameters end, so ranks differ only in
the padding, which no optimizer steps, and in PyTorch's step counters, one for each piece of a parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from ..specs import Layout
from ..specs.check import whole
from .data_rows import DataRows, Rowed


class Share(NamedTuple):
    """Numbers that one rank holds: of `weights`; of `gradients` of all that is trained, and of its `part` of those
    where it keeps that apart; padding included. Its optimizer steps `stepped` numbers, in so many `pieces`."""

    weights: int
    gradients: int
    part: int
    stepped: int
    pieces: int


def share(rows: DataRows, coordinate: int, apart: bool) -> Share:
    """What the rank at `coordinate` of the data axis holds. `apart` says whether, under stage 1, it keeps its part of
    the gradients in another format than all of them."""
    zero, trained = rows.layout.zero, rows.parameters.trained
    everything = sum(each.numel for each in rows.parameters)
    stepped = sum(each.numel for each in trained)
    if not zero:
        return Share(everything, stepped, 0, stepped, len(trained))
    padded, part = (sum(getattr(row, of) for row, _ in rows.gradients) for of in ("numel", "share"))
    weights = (sum(each.row.share for unit in rows.units for each in unit.rows) if zero == 3
               else everything - stepped + padded)
    return Share(weights, padded if zero == 1 else 0, part if apart or zero > 1 else 0,
                 sum(row.held(coordinate) for row, _ in rows.gradients),
                 sum(sum(1 for _ in row.slices(coordinate)) for row, _ in rows.gradients))


def own(rows: Sequence[Rowed], coordinate: int) -> dict[str, int]:
    """How many numbers of each parameter a rank has in its slices of the rows, where it has any."""
    return {parameters[i].name: last - first for row, parameters in rows for i, first, last in row.slices(coordinate)}


def fullest(rows: Sequence[Rowed], p: int, number: int, piece: int) -> int:
    """Which of `p` ranks holds most, the first of equals, where each has `number` bytes for a number in its slices and
    `piece` bytes for a piece of a parameter."""
    change: Counter[int] = Counter()  # from one rank to the next
    for row, _ in rows:
        full, rest = divmod(row.filled, row.share)
        change.update({0: row.share * number, full: rest * number})
        change.subtract({full: row.share * number, full + 1: rest * number})
        for start, size in zip(row.starts, row.sizes, strict=True):
            change[start // row.share] += piece
            change[(start + size - 1) // row.share + 1] -= piece
    held = list(accumulate(change[r] for r in range(p)))
    return held.index(max(held))


def coordinate_of(rank: int, layout: Layout) -> int:
    """Where `rank` stands on the data axis. Raises ValueError on a rank that the layout hasn't got."""
    if whole("rank", rank, 0) >= layout.world_size:
        raise ValueError(f"rank = {rank} is none of {layout.world_size} ranks: the last is {layout.world_size - 1}")
    return rank // layout.tp
