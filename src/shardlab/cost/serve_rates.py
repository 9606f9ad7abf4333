"""How many requests a second keep their times: one server with prompts and answers, or a pool for each.

Closed forms, of means: a prompt waits as in M/D/1, a batch is where λ · O · TPOT(B) = B. A mean is not the 90th of a
hundred, and a real trace has hours of its own: the simulator (`serve.simulate`) plays them. These say which way to
look, and what can't work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import ceil, inf
from typing import NamedTuple

from ..specs.check import number, whole
from .queueing import Steady, StepSeconds, fixed_point, md1_wait

BUDGETS = (256, 512, 1024, 2048, 4096, 8192)  # tokens of a step that decodes and pieces of prompts share
TRIES = 16  # halvings of a rate: to one part in 65,536


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is asked for: `rate` requests a second, of `prompt` tokens, of which the share `hits` is cached already, and
    `answer` new ones. On average the first token may take `ttft` seconds, a further one `tpot`; `gap` is the longest
    that an answer may stand still between two tokens. None is no limit. Raises ValueError on what is not above 0."""

    rate: float
    prompt: int
    answer: int
    hits: float = 0.0
    ttft: float | None = None
    tpot: float | None = None
    gap: float | None = None

    def __post_init__(self):
        number("rate", self.rate)
        for name in ("prompt", "answer"):
            whole(name, getattr(self, name))
        for name in ("ttft", "tpot", "gap"):
            if getattr(self, name) is not None:
                number(name, getattr(self, name))
        if not 0 <= self.hits < 1:
            raise ValueError(f"hits = {self.hits} is a share of the prompt: 0 to less than 1")

    @property
    def uncached(self) -> int:
        """Tokens of a prompt that are computed, the last one at least."""
        return max(1, ceil(self.prompt * (1 - self.hits)))

    @property
    def longest(self) -> int:
        """Tokens of a request at its end."""
        return self.prompt + self.answer

    @property
    def context(self) -> int:
        """Tokens that a decoding request has on average."""
        return self.prompt + (self.answer + 1) // 2

    def keeps(self, ttft: float, tpot: float, gap: float) -> bool:
        """Whether these seconds are within the limits."""
        return all(limit is None or value <= limit for value, limit in (
            (ttft, self.ttft), (tpot, self.tpot), (gap, self.gap)))


class Rate(NamedTuple):
    """Requests a second at most, and what they then take on average: first token, further ones, the longest gap;
    `batch` requests decode at once. `how` says which policy or pool makes it, `budget` the tokens of its steps."""

    rate: float
    ttft: float
    tpot: float
    gap: float
    batch: float
    how: str
    budget: int | None = None


NONE = Rate(0.0, inf, inf, inf, 0.0, "nothing keeps the times")


def prefill_seconds(step: StepSeconds, load: Load, budget: int | None = None, batch: int = 0) -> tuple[float, float]:
    """Seconds that a server is busy with one prompt, and of one of the steps that it takes: the whole prompt in one
    (`budget` None), or pieces, beside `batch` decodes, in steps of `budget` tokens."""
    cached = load.prompt - load.uncached
    if budget is None:
        whole_one = step([(load.uncached, load.prompt)])
        return whole_one, whole_one
    piece = min(load.uncached, budget - batch)
    if piece < 1:
        return inf, inf
    pieces = load.uncached / piece
    one = step([(1, load.context)] * batch + [(piece, cached + (load.uncached + piece) // 2)])
    return pieces * one, one


def colocated_at(rate: float, step: StepSeconds, load: Load, most: int, budget: int | None, flight: int = 1
                 ) -> Rate | None:
    """What `rate` requests a second take on a server that computes prompts and answers; None where it is too many.

    With a budget a decode waits for the pieces of prompts in its step; with None for whole prompts, one after the
    other, between steps. `most` requests fit at once; `flight` batches are under way, one in each stage of a pipeline.
    """
    return _at(rate, load, most, budget, flight, *_times(step, load, budget, flight))


def colocated(step: StepSeconds, load: Load, most: int, flight: int = 1) -> Rate:
    """The most requests a second that keep the load's times on one server, with the budget that is best for it."""
    best = NONE
    for budget in (None, *BUDGETS):
        plain, prompts = _times(step, load, budget, flight)

        def at(rate: float, budget: int | None = budget, plain: Plain = plain, prompts: Prompts = prompts
               ) -> Rate | None:
            return _at(rate, load, most, budget, flight, plain, prompts)

        best = max(best, _highest(at, load, flight / prompts(1)[0]), key=lambda one: one.rate)
    return best


def keeps_at(rate: float, step: StepSeconds, load: Load, most: int, flight: int = 1) -> bool:
    """Whether one server keeps the load's times at that rate, with some budget."""
    found = (colocated_at(rate, step, load, most, budget, flight) for budget in (None, *BUDGETS))
    return any(one is not None and load.keeps(one.ttft, one.tpot, one.gap) for one in found)


Plain = Callable[[int], float]  # seconds of a step of decodes alone, of so many requests
Prompts = Callable[[int], tuple[float, float]]  # `prefill_seconds`, beside so many


def _times(step: StepSeconds, load: Load, budget: int | None, flight: int) -> tuple[Plain, Prompts]:
    """Both remembered: a search asks for the same ones again and again."""
    def plain(n: int) -> float:
        return step([(1, load.context)] * -(-n // flight))

    def prompts(n: int) -> tuple[float, float]:
        return prefill_seconds(step, load, budget, -(-n // flight))

    return cache(plain), cache(prompts)


def _at(rate: float, load: Load, most: int, budget: int | None, flight: int, plain: Plain, prompts: Prompts
        ) -> Rate | None:
    def tpot(n: int) -> float:
        seconds, one = prompts(n)
        share = rate * seconds / flight
        if share >= 1:
            return inf
        if budget is None:
            return plain(n) / (1 - share)
        return 1 / (share / one + (1 - share) / plain(n))  # so many steps a second have a piece, the others none

    at: Steady = fixed_point(rate * load.answer, tpot, most)
    if at.batch is None or at.tpot is None:
        return None
    n = max(1, ceil(at.batch))
    seconds, one = prompts(n)
    ttft = md1_wait(rate, seconds / flight) + seconds
    gap = one if budget is not None else one + plain(n)
    return Rate(rate, ttft, at.tpot, gap, at.batch, f"pieces of {budget:,} tokens a step" if budget else
                "whole prompts between steps", budget)


def prefill_pool(step: StepSeconds, load: Load, after: float = 0.0, flight: int = 1) -> Rate:
    """The same of a server of prompts alone, with `after` seconds from there to the first token: what of the cache's
    transfer nothing hides."""
    seconds, _ = prefill_seconds(step, load)

    def at(rate: float) -> Rate | None:
        if rate * seconds / flight >= 1:
            return None
        return Rate(rate, md1_wait(rate, seconds / flight) + seconds + after, 0.0, 0.0, 0.0, "prompts alone")

    return _highest(at, load, flight / seconds)


def decode_pool(step: StepSeconds, load: Load, most: int, flight: int = 1) -> Rate:
    """The same of a server of answers alone."""
    plain, _ = _times(step, load, None, flight)

    def at(rate: float) -> Rate | None:
        here = fixed_point(rate * load.answer, plain, most)
        if here.batch is None or here.tpot is None:
            return None
        return Rate(rate, 0.0, here.tpot, here.tpot, here.batch, "answers alone")

    return _highest(at, load, most / (load.answer * plain(most)))


def best_split(prefill: float, decode: float, instances: int) -> tuple[int, float]:
    """How many of the instances should compute prompts, and requests a second of all: the lesser of what the two pools
    do, where an instance does `prefill` or `decode` of them. Raises ValueError on fewer than two instances."""
    if whole("instances", instances) < 2:
        raise ValueError("one instance can't be split: a pool for prompts and one for answers take two")
    return max(((n, min(n * prefill, (instances - n) * decode)) for n in range(1, instances)),
               key=lambda pair: pair[1])


def _highest(at: Callable[[float], Rate | None], load: Load, limit: float) -> Rate:
    """The highest rate up to `limit` that keeps the times, by halving; `NONE` where next to nothing does."""
    def good(rate: float) -> Rate | None:
        found = at(rate)
        return found if found and load.keeps(found.ttft, found.tpot, found.gap) else None

    low, high, best = 0.0, limit, NONE
    for _ in range(TRIES):
        middle = (low + high) / 2
        found = good(middle)
        low, high, best = (middle, high, found) if found else (low, middle, best)
    return best
