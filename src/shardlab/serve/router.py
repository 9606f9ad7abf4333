"""Which of several replicas a request goes to."""

from __future__ import annotations

from collections.abc import Sequence

from .events import Instance
from .request import Request


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._next = 0

    def pick(self, instances: Sequence[Instance], request: Request) -> Instance:
        self._next += 1
        return instances[(self._next - 1) % len(instances)]
