"""What ZeRO has whole for a moment: rows of gradients before they are sent, and under stage 3 units of weights."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from .data_rows import DataRows, Unit


class Moment(NamedTuple):
    """Numbers of weights and of gradients that are whole at the same time."""

    weights: int
    gradients: int


def under_way(rows: DataRows) -> Moment:
    """The largest moment of a step, for `parallel.zero.shard`: the numbers that a rank has whole beside its share.

    Under stage 2 a row is sent while the next one fills; under stage 3 the next unit is gathered while one computes, in
    forward and in backward, and the gradients of the one before are sent. What autograd has of a single gradient before
    it is put in its row isn't counted. Plain data parallelism and stage 1 keep whole rows, which their bills have.
    """
    moments = [Moment(0, 0)]
    if rows.layout.zero == 2:
        sizes = [row.numel for row, _ in rows.gradients]
        moments += [Moment(0, one + other) for one, other in pairwise([*sizes, 0])]
    elif rows.layout.zero == 3:
        moments += _stage3(rows.units, rows.tied)
    return max(moments, key=sum)


def _stage3(units: list[Unit], tied: bool) -> Iterator[Moment]:
    """Backward from the head down; a tied head has one row with the embedding, which fills from the first moment to the
    last."""
    order = [*units, units[0]] if tied else units
    for one, other in pairwise(order):  # forward
        yield Moment(one.numel() + other.numel(), 0)
    weights = [unit.numel() if unit.again or i == len(order) - 1 else 0 for i, unit in enumerate(order)]
    gradients = [unit.numel(trained=True) for unit in order]
    ends = gradients[-1] if tied else 0
    if tied:
        gradients[0] = gradients[-1] = 0  # they are one row, and there all the time
    for i in range(len(order) - 1, 0, -1):
        sent = gradients[i + 1] if i + 1 < len(order) else 0
        ahead = weights[i - 1] if i > 1 else 0
        yield Moment(weights[i] + ahead, gradients[i] + sent + ends)
