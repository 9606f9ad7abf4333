"""Of how many micro-batches a rank of a pipeline keeps activations, and when: read from the list that runs.

GPipe keeps all m, 1F1B min(p − r, m) at place r of p; the other schedules have no formula as short.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..schedule import Action, computing


class Moment(NamedTuple):
    """How many micro-batches of each stage have their backward to come (`live`), and their weight gradients (`late`).
    While B or I runs, `busy` is its stage; between two actions it is None."""

    live: tuple[tuple[int, int], ...]
    late: tuple[tuple[int, int], ...]
    busy: int | None


def moments(order: Sequence[Action]) -> list[Moment]:
    """What is kept inside of each B and I of the list, and behind each action: what differs, in order."""
    actions = computing([order])[0]
    stages = sorted({action.stage for action in actions})
    at = {stage: i for i, stage in enumerate(stages)}
    live, late = [0] * len(stages), [0] * len(stages)
    seen: dict[tuple[tuple[int, ...], tuple[int, ...], int | None], None] = {}
    for kind, stage, *_ in actions:
        i = at[stage]
        if kind == "F":
            live[i] += 1
        elif kind == "W":
            late[i] -= 1
        else:
            seen[tuple(live), tuple(late), stage] = None
            live[i] -= 1
            late[i] += kind == "I"
        seen[tuple(live), tuple(late), None] = None

    def told(some: Sequence[int]) -> tuple[tuple[int, int], ...]:
        return tuple((stage, n) for stage, n in zip(stages, some, strict=True) if n)

    return [Moment(told(here), told(there), busy) for here, there, busy in seen]
