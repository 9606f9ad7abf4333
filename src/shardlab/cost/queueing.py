"""Queues in closed form: how long one waits, how many are inside, and the batch at which a service keeps pace.

Service times of a batch depend on the batch, and the batch on service times: λ · O · TPOT(B) = B is a fixed point to be
found, not a multiplication.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import ceil
from typing import NamedTuple

from ..specs.check import amount, number, whole

Work = Sequence[tuple[int, int]]  # of one step: (new tokens, context, the new ones included) of each request
StepSeconds = Callable[[Work], float]


class Alike(Sequence[tuple[int, int]]):
    """A step's work in which many requests are alike: who counts them need not look at each."""

    def __init__(self, counts: Counter[tuple[int, int]]):
        self.counts = counts

    def __len__(self) -> int:
        return self.counts.total()

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return self.counts.elements()

    def __getitem__(self, index):
        return list(self)[index]

    def __add__(self, other: Alike) -> Alike:
        return Alike(self.counts + other.counts)


def alike(times: int, one: tuple[int, int]) -> Alike:
    """So many requests with (new tokens, context) `one`."""
    return Alike(Counter({one: times}))


def md1_wait(rate: float, service: float) -> float:
    """Seconds that a request waits on average before its turn, where requests come at random, `rate` a second, and each
    takes the server `service` seconds: ρ S / (2 (1 − ρ)) with ρ = λ S, M/D/1 (Pollaczek and Khinchine; DistServe,
    arXiv:2401.09670, §3.1). Raises ValueError where more comes than is served."""
    busy = number("rate", rate) * number("service", service)
    if busy >= 1:
        raise ValueError(f"{rate:g} requests a second of {service:g} s each keep a server busy {busy:.2f} times over: "
                         f"the queue grows for ever; take {int(busy) + 1} servers, or quicker ones")
    return busy * service / (2 * (1 - busy))


def little(rate: float, seconds: float) -> float:
    """How many requests are inside on average, where `rate` come a second and each stays `seconds`: L = λ W (Little,
    Operations Research 9(3), 1961). It holds for any order of service, in the long run."""
    return number("rate", rate) * number("seconds", seconds)


MORE = 8  # times what fits: a batch at which memory is no limit


class Steady(NamedTuple):
    """Where a server comes to rest: `batch` requests at once on average, a token of each every `tpot` seconds. Both are
    None where there is no such point, and `limit` says what there is not enough of: "memory", where a larger batch than
    `most` would do, or "speed", where one of eight times as many wouldn't either.
    `tokens` is how many a second it makes at most."""

    batch: float | None
    tpot: float | None
    tokens: float
    most: int
    limit: str = ""


def fixed_point(tokens: float, tpot: Callable[[int], float], most: int) -> Steady:
    """The smallest B with B = tokens · TPOT(B), where `tokens` a second are asked for and `tpot(n)` is seconds a token
    with n requests at once, 1 to `most`; between whole numbers it is taken to be straight.

    Found from below: with n at once, so many tokens' time lets that many more come in, until no more do; the straight
    line through the last two counts is followed on the way. A token must not take less time where more are at once.
    Where there is no such point, `limit` is "speed": see `steady`.
    """
    below, under, n, at_most = 0, 0.0, 1, whole("most", most) / tpot(most)
    while (inside := tokens * tpot(n)) > n:
        if inside > most or n == most:
            return Steady(None, None, at_most, most, "speed")
        slope = (inside - under) / (n - below) if below else 0.0  # of the line through the last two
        ahead = (inside - n) / (1 - slope) if slope < 1 else 2.0 * (n - below)
        below, under, n = n, inside, min(most, max(ceil(inside), n + max(1, int(min(ahead, most)))))
    while n - below > 1:  # the line may have led too far where time a token bends down
        half = (below + n) // 2
        below, n = (below, half) if tokens * tpot(half) <= half else (half, n)
    here = tpot(n)
    if n == 1:
        return Steady(tokens * here, here, at_most, most)
    before = tpot(n - 1)
    slope = here - before
    batch = tokens * (before - (n - 1) * slope) / (1 - tokens * slope)
    return Steady(batch, before + (batch - n + 1) * slope, at_most, most)


def steady(rate: float, answer: int, step: StepSeconds, *, context: int, most: int, prefill: float = 0.0,
           flight: int = 1) -> Steady:
    """The batch at which a server keeps pace with `rate` requests a second for `answer` tokens each.

    `step` is the time of a step, and each of a decoding step's requests has a context of `context` tokens on average;
    `most` of them fit at once. `prefill` seconds of every request the server is busy otherwise (its own prompts, where
    they are not another server's). `flight` batches are under way at once, one in each stage of a pipeline. Nothing is
    random here: a mean, around which a real batch goes up and down. Raises ValueError on numbers that are not above 0,
    and where prompts alone keep the server busy.
    """
    busy = number("rate", rate) * amount("prefill", prefill)
    whole("flight", flight)
    if prefill and busy >= 1:
        return Steady(None, None, 0.0, most, "speed")
    whole("answer", answer)
    work = (1, whole("context", context))

    def tpot(n: int) -> float:
        return step(alike(-(-n // flight), work)) / (1 - busy)

    found = fixed_point(rate * answer, tpot, most)
    if found.batch is None and rate * answer * tpot(MORE * most) <= MORE * most:
        return found._replace(limit="memory")
    return found
