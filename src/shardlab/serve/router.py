"""Which of several replicas a request goes to, and whether its prompt is worth a replica of its own.

Where several are as good, chance decides, of a generator that is given: whoever always took the first would send all
requests of a quiet minute to one replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from ..specs.check import whole
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


class LeastOutstanding:
    """The one with the fewest tokens still to compute or to make."""

    def __init__(self, generator: Random):
        self.generator = generator

    def pick(self, instances: Sequence[Instance], request: Request) -> Instance:
        least = min(each.outstanding for each in instances)
        return self.generator.choice([each for each in instances if each.outstanding == least])


class PrefixAffinity:
    """The one that knows most of the prompt, if it has at most `ahead` tokens outstanding more than the one with the
    fewest; of several, one of the fewest.

    Without such a bound a prefix that everybody asks with brings everybody to one replica, which then is slower than
    computing the prefix again elsewhere. Raises ValueError on an `ahead` below 0.
    """

    def __init__(self, generator: Random, ahead: int = 8192):
        self.ahead, self._least = whole("ahead", ahead, least=0), LeastOutstanding(generator)

    def pick(self, instances: Sequence[Instance], request: Request) -> Instance:
        bound = min(each.outstanding for each in instances) + self.ahead
        known = {each: each.pool.known(request.prompt) for each in instances if each.outstanding <= bound}
        most = max(known.values())
        return self._least.pick([each for each, tokens in known.items() if tokens == most], request)


def apart(threshold: int) -> Callable[[int, Request], bool]:
    """For a cluster: prompts with more than `threshold` tokens to be computed go to the prefill instances, and others
    are computed where they end, which takes less than to send a cache. Raises ValueError on one below 0."""
    whole("threshold", threshold, least=0)
    return lambda uncached, request: uncached > threshold
