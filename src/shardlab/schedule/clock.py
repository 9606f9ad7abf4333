"""When each action runs, if a rank does its list in order and each action as soon as what it needs is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from .action import Action, Orders, What, computing, gives, needs, size


class Span(NamedTuple):
    """An action of a rank, from `start` to `end`."""

    action: Action
    start: float
    end: float


Duration = Callable[[Action], float]


def units(action: Action) -> float:
    """A forward pass is 1, and so is each half of a backward pass."""
    return 2.0 if action.kind == "B" else 1.0


def clock(orders: Orders, duration: Duration = units, hop: float = 0.0,
          both: Callable[[Action, Action], float] | None = None) -> list[list[Span]]:
    """For each rank its computing actions with their times, the first starting at 0.

    `duration(action)` is how long an action takes; what one rank gives another arrives `hop` later, while both go on.
    A paired action and the one after it run together, for `both(first, second)`, or as long as the two would take one
    after the other. Raises ValueError where the lists wait for each other in a circle, or for what nobody does,
    naming where each rank stands.
    """
    todo = computing(orders)
    last = size(todo)[0] - 1
    spans: list[list[Span]] = [[] for _ in todo]
    done: dict[What, tuple[float, int]] = {}  # when, and by which rank
    waiting: dict[What, list[int]] = {}  # the ranks that wait for it
    runnable = list(range(len(todo)))

    def work(rank: int) -> Iterator[What]:
        """Do the rank's list, and yield what it must wait for."""
        free, order, mine = 0.0, iter(todo[rank]), spans[rank]
        for action in order:
            second = next(order, None) if action.paired else None
            start = free
            for need in needs(action, last) + (needs(second, last) if second else ()):
                if need not in done:
                    yield need
                when, where = done[need]
                if where != rank:
                    when += hop
                if when > start:
                    start = when
            length = duration(action)
            if second:
                length = both(action, second) if both else length + duration(second)
            free = start + length
            for one in (action, second) if second else (action,):
                mine.append(Span(one, start, free))
                done[what := gives(one)] = free, rank
                if what in waiting:
                    runnable.extend(waiting.pop(what))

    works = [work(rank) for rank in runnable]
    while runnable:
        rank = runnable.pop()
        for need in works[rank]:  # up to the first for which it waits
            waiting.setdefault(need, []).append(rank)
            break
    if stuck := [f"rank {rank} at {order[len(mine)]}"
                 for rank, (order, mine) in enumerate(zip(todo, spans, strict=True)) if len(mine) < len(order)]:
        raise ValueError(f"the ranks wait for each other, or for what no rank does: {', '.join(stuck)}")
    return spans
