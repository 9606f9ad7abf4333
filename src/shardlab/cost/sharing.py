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
from .parameters import Parameters


class Share(NamedTuple):
    """Numbers that one rank holds: of `weights`; of `gradients` of all that is trained, and of its `part` of those
    where it keeps that apart. Its optimizer steps `stepped` numbers, padding left out, in so many `pieces`."""

    weights: int
    gradients: int
    part: int
    stepped: int
    pieces: int

    def plus(self, other: Share) -> Share:
        """What a rank holds of two kinds of parameters."""
        return Share(*map(sum, zip(self, other, strict=True)))


def share(rows: DataRows, coordinate: int, converted: bool) -> Share:
    """What the rank at `coordinate` of the data axis holds. `converted` says whether it keeps its part of the gradients
    in another format than they are sent in: then stage 1 has it apart, and it is without padding."""
    zero, trained = rows.layout.zero, rows.parameters.trained
    everything = sum(each.numel for each in rows.parameters)
    stepped = sum(each.numel for each in trained)
    if not zero:
        return Share(everything, stepped, 0, stepped, len(trained))
    mine = Counter(row for row, _ in rows.gradients)  # most are alike
    padded = sum(n * row.numel for row, n in mine.items())
    held = sum(n * row.held(coordinate) for row, n in mine.items())
    weights = everything - stepped + padded
    if zero == 3:
        weights = sum(each.row.share for unit in rows.units for each in unit.rows)
        weights += sum(each.numel for each in rows.parameters if each.whole)
    part = held if converted else 0 if zero == 1 else sum(n * row.share for row, n in mine.items())
    return Share(weights, padded if zero == 1 else 0, part, held,
                 sum(n * sum(1 for _ in row.slices(coordinate)) for row, n in mine.items()))


def left(parameters: Parameters, converted: bool) -> Share:
    """What a rank holds of parameters that are not shared out: `converted` says whether ZeRO's optimizer steps them all
    the same in another format than their gradients', which it then has in both."""
    everything = sum(each.numel for each in parameters)
    stepped = sum(each.numel for each in parameters.trained)
    return Share(everything, stepped, stepped if converted else 0, stepped, len(parameters.trained))


def own(rows: Sequence[Rowed], coordinate: int) -> dict[str, int]:
    """How many numbers of each parameter a rank has in its slices of the rows, where it has any."""
    return {parameters[i].name: last - first for row, parameters in rows for i, first, last in row.slices(coordinate)}


def fullest(rows: Sequence[Rowed], p: int, number: int, piece: int) -> int:
    """Which of `p` ranks holds most, the first of equals: see `held_of`."""
    held = held_of(rows, p, number, piece)
    return held.index(max(held))


def held_of(rows: Sequence[Rowed], p: int, number: int, piece: int) -> list[int]:
    """What each of `p` ranks holds, but for what all hold alike, where it has `number` bytes for a number in its slices
    and `piece` bytes for a piece of a parameter."""
    change: Counter[int] = Counter()  # from one rank to the next
    for row, n in Counter(row for row, _ in rows).items():
        full, rest = divmod(row.filled, row.share)
        for rank, more in ((0, row.share), (full, rest - row.share), (full + 1, -rest)):
            change[rank] += n * number * more
        for start, size in zip(row.starts, row.sizes, strict=True):
            change[start // row.share] += n * piece
            change[(start + size - 1) // row.share + 1] -= n * piece
    return list(accumulate(change[r] for r in range(p)))


def rank_of(rank: int, layout: Layout) -> int:
    """`rank`. Raises ValueError where the layout hasn't got it."""
    if whole("rank", rank, 0) >= layout.world_size:
        raise ValueError(f"rank = {rank} is none of {layout.world_size} ranks: the last is {layout.world_size - 1}")
    return rank
