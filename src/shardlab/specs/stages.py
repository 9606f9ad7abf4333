"""Which layers are in which stage of a pipeline: one rule, used by the library and by `cost`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf, isfinite


def split(layers: int, stages: int, weights: Sequence[float] | None = None) -> list[range]:
    """The layers of each stage, in order, each in exactly one; a stage is empty where there are more than layers, or
    where its end weighs as much as others do without.

    `weights` says how much each layer weighs, by default all the same: the heaviest stage is as light as it can be, and
    the others are then as even as they can be. Two more than layers are the embedding's before and the head's behind,
    which stay in the first and in the last stage. Raises ValueError on other counts, and on weights below 0.
    """
    if stages < 1 or layers < 0:
        raise ValueError(f"{layers} layers in a pipeline of {stages} stages: give at least 1 stage, and layers from 0")
    given = [1.0] * layers if weights is None else [float(weight) for weight in weights]
    if len(given) not in (layers, layers + 2) or not all(isfinite(weight) and weight >= 0 for weight in given):
        raise ValueError(f"weights must be {layers} numbers from 0, one a layer, or {layers + 2} with those of "
                         f"embedding and head, not {weights}")
    if stages == 1:  # which every bill asks for that has no pipeline
        return [range(layers)]
    heavy = max(given, default=0.0) or 1.0  # squares of very large or small numbers are none
    given = [weight / heavy for weight in given]
    first, *rest = given if len(given) > layers else [0.0, *given, 0.0]
    *each, last = rest
    before = [0.0]  # before[i]: the weight of the first i layers
    for weight in each:
        before.append(before[-1] + weight)

    def weight_of(stage: int, start: int, stop: int) -> float:
        return before[stop] - before[start] + (first if stage == 0 else 0) + (last if stage == stages - 1 else 0)

    heaviest = _best(layers, stages, weight_of, max, inf)[0]
    squares = _best(layers, stages, lambda *part: weight_of(*part) ** 2, lambda a, b: a + b,
                    heaviest**2 * (1 + 1e-12))  # sums of weights round
    bounds = squares[1]
    return [range(start, stop) for start, stop in pairwise(bounds)]


def _best(layers: int, stages: int, cost, join, limit: float) -> tuple[float, list[int]]:
    """The cheapest way to cut, with no part above `limit`: (its cost, where it cuts, from 0 to the end).

    Stage by stage, for every number of layers that the stages up to here may have: the cost, and where the last began.
    """
    table: list[tuple[float, int]] = [(0.0 if n == 0 else inf, 0) for n in range(layers + 1)]
    begins = []
    for stage in range(stages):
        table = [min(((join(table[start][0], part), -start) for start in range(stop + 1)
                      if (part := cost(stage, start, stop)) <= limit), default=(inf, 0)) for stop in range(layers + 1)]
        table = [(value, -start) for value, start in table]
        begins.append(table)
    bounds = [layers]
    for each in reversed(begins):
        bounds.append(each[bounds[-1]][1])
    return table[layers][0], bounds[::-1]
