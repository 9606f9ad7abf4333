"""Which of several replicas a request goes to."""

from __future__ import annotations

from collections.abc import Sequence

from .events import Instance
from .request import Request


class RoundRobin:
    """The one whose last turn was longest ago, whoever else there is to choose from."""

    def __init__(self) -> None:
        self._turns = 0
        self._last = dict[Instance, int]()

    def pick(self, instances: Sequence[Instance], request: Request) -> Instance:
        self._turns += 1
        chosen = min(instances, key=lambda each: self._last.get(each, 0))
        self._last[chosen] = self._turns
        return chosen
