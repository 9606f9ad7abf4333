"""Of how many micro-batches each place of a pipeline keeps activations, and when: read from the lists that run.

GPipe keeps all m, 1F1B min(p − r, m) at place r of p; the other schedules have no formula as short.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from ..schedule import SCHEDULES, Action, Orders, computing
from ..specs import Layout


class Moment(NamedTuple):
    """How many micro-batches of each stage have their backward to come (`live`), and their weight gradients (`late`).
    While B or I runs, `busy` is its stage; between two actions it is None."""

    live: tuple[tuple[int, int], ...]
    late: tuple[tuple[int, int], ...]
    busy: int | None


def moments(order: Sequence[Action]) -> Iterator[Moment]:
    """What is kept inside of each B and I of the list, and behind each action."""
    live: Counter[int] = Counter()
    late: Counter[int] = Counter()
    for kind, stage, *_ in computing([order])[0]:
        if kind == "F":
            live[stage] += 1
        elif kind == "W":
            late[stage] -= 1
        else:
            yield _moment(live, late, stage)
            live[stage] -= 1
            late[stage] += kind == "I"
        yield _moment(live, late, None)


def fullest(layout: Layout) -> list[list[Moment]]:
    """The moments of each place of the layout's pipeline at which no other one has as much of everything. Without a
    pipeline one pass is kept at a time."""
    times = layout.microbatches if layout.pp > 1 and layout.kind == "gpipe" else 1
    return [[each._replace(live=tuple((stage, n * times) for stage, n in each.live)) for each in some]
            for some in _fullest(*_short(layout))]


def shortened(layout: Layout) -> Orders:
    """The layout's schedule, with no more micro-batches than it takes for every place to hold what it ever holds: two
    for each rank, and of GPipe, which holds them all, one. What a schedule does in its middle it does over and over."""
    return _orders(*_short(layout))


def _short(layout: Layout) -> tuple[str, int, int, int]:
    """Name, ranks, micro-batches and chunks."""
    if layout.pp == 1:
        return "1f1b", 1, 1, 1
    most = 1 if layout.kind == "gpipe" else 2 * layout.pp
    return layout.kind, layout.pp, min(layout.microbatches, most), layout.chunks


@cache
def _orders(kind: str, pp: int, microbatches: int, chunks: int) -> Orders:
    return SCHEDULES[kind](pp, microbatches, **({"chunks": chunks} if kind == "interleaved" else {}))


@cache
def _fullest(*sizes) -> list[list[Moment]]:
    out = []
    for order in _orders(*sizes):
        some = list(dict.fromkeys(moments(order)))
        out.append([each for each in some if not any(_less(each, other) for other in some)])
    return out


def _less(one: Moment, other: Moment) -> bool:
    """Whether the other has all that the one has, and more."""
    live, late = dict(other.live), dict(other.late)
    return (one != other and one.busy in (None, other.busy) and all(n <= live.get(stage, 0) for stage, n in one.live)
            and all(n <= late.get(stage, 0) for stage, n in one.late))


def _moment(live: Counter[int], late: Counter[int], busy: int | None) -> Moment:
    return Moment(tuple(sorted((+live).items())), tuple(sorted((+late).items())), busy)
