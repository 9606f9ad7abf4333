"""When each action runs, if a rank does its list in order and each action as soon as what it needs is there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from .action import Action, Orders, computing, gives, needs, size


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
    todo, (stages, _) = computing(orders), size(orders)
    done: dict[tuple[str, int, int], tuple[float, int]] = {}  # when, and by which rank
    spans: list[list[Span]] = [[] for _ in todo]
    waiting: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    free, runnable = [0.0] * len(todo), list(range(len(todo)))[::-1]

    while runnable:
        rank = runnable.pop()
        order, mine = todo[rank], spans[rank]
        while len(mine) < len(order):
            together = order[len(mine) : len(mine) + 1 + order[len(mine)].paired]
            start, missing = free[rank], None
            for action in together:
                for need in needs(action, stages - 1):
                    if need not in done:
                        missing = need
                        break
                    when, where = done[need]
                    start = max(start, when if where == rank else when + hop)
            if missing is not None:
                waiting[missing].append(rank)
                break
            if len(together) == 2:
                length = both(*together) if both else duration(together[0]) + duration(together[1])
            else:
                length = duration(together[0])
            free[rank] = start + length
            for action in together:
                mine.append(Span(action, start, free[rank]))
                done[gives(action)] = free[rank], rank
                runnable += waiting.pop(gives(action), ())
    if stuck := [f"rank {rank} at {todo[rank][len(mine)]}" for rank, mine in enumerate(spans)
                 if len(mine) < len(todo[rank])]:
        raise ValueError(f"the ranks wait for each other, or for what no rank does: {', '.join(stuck)}")
    return spans
