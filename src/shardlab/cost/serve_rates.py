"""How many requests a second keep their times: one server with prompts and answers, or a pool for each.

Closed forms, of means: a prompt waits as in M/D/1, a batch is where λ · O · TPOT(B) = B. A mean is not the 90th of a
hundred, and a real trace has hours of its own: the simulator (`serve.simulate`) plays them. These say which way to
look, and what can't work.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import ceil, inf
from typing import NamedTuple

from ..specs.check import amount, whole
from .load import Load
from .queueing import Steady, StepSeconds, alike, fixed_point, md1_wait

BUDGETS = (256, 512, 1024, 2048, 4096, 8192)  # tokens of a step that decodes and pieces of prompts share
WHOLE = BUDGETS[-1]  # tokens of whole prompts that are computed together at most
TRIES = 16  # halvings of a rate: to one part in 65,536


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


def prefill_seconds(step: StepSeconds, load: Load, budget: int | None = None, batch: int = 0, together: int = 1
                    ) -> tuple[float, float]:
    """Seconds that a server is busy with one prompt, and of one of the steps that it takes: the whole prompt in one
    (`budget` None), or pieces, beside `batch` decodes, in steps of `budget` tokens. `together` prompts share a step, if
    they fit whole (`in_a_step`)."""
    cached = load.prompt - load.uncached
    piece = load.uncached if budget is None else min(load.uncached, budget - batch)
    if piece < 1:
        return inf, inf
    prompts = alike(together, (piece, cached + (load.uncached + piece) // 2))
    one = step(prompts if budget is None else alike(batch, (1, load.context)) + prompts)
    return load.uncached / piece * one / together, one


def in_a_step(load: Load, most: int, budget: int | None, batch: int) -> int:
    """How many prompts a step computes at most, where `most` requests fit; one at least, if it has to in pieces."""
    return max(1, min(most, (WHOLE if budget is None else budget - batch) // load.uncached))


def waiting(rate: float, most: int, one: Callable[[int], float], beside: float = 0.0, least: int = 1) -> int:
    """How many prompts share a step where `rate` come a second: as many as come while so many are computed, for `one`
    of them seconds and `beside` of other work; from `least` to `most`."""
    low, high = least, max(least, most)
    while low < high:
        half = (low + high) // 2
        low, high = (low, half) if rate * (one(half) + beside) <= half else (half + 1, high)
    return low


def first_token(rate: float, most: int, one: Callable[[int], float], seconds: float) -> float:
    """Seconds from arrival to a prompt's end, of `seconds` alone: as in M/D/1, one after the other; or, where that is
    sooner, half of a step's wait and then a step with all that have come meanwhile."""
    ways = [md1_wait(rate, seconds) + seconds] if rate * seconds < 1 else []
    if most > 1:
        m = waiting(rate, most, one, least=2)
        if rate * one(m) < m:
            full = md1_wait(rate / m, one(m)) if m == most else 0.0
            ways.append(one(m) + max(one(m) / 2, full))
    return min(ways, default=inf)


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

        limit = min(flight / prompts(1, in_a_step(load, most, budget, 1))[0], most / (load.answer * plain(most)))
        best = max(best, _highest(at, load, limit), key=lambda one: one.rate)
    return best


def keeps_at(rate: float, step: StepSeconds, load: Load, most: int, flight: int = 1) -> bool:
    """Whether one server keeps the load's times at that rate, with some budget."""
    found = (colocated_at(rate, step, load, most, budget, flight) for budget in (None, *BUDGETS))
    return any(one is not None and load.keeps(one.ttft, one.tpot, one.gap) for one in found)


Plain = Callable[[int], float]  # seconds of a step of decodes alone, of so many requests
Prompts = Callable[[int, int], tuple[float, float]]  # `prefill_seconds`, beside so many, of so many together


def _times(step: StepSeconds, load: Load, budget: int | None, flight: int) -> tuple[Plain, Prompts]:
    """Both remembered: a search asks for the same ones again and again."""
    def plain(n: int) -> float:
        return step(alike(-(-n // flight), (1, load.context)))

    def prompts(n: int, together: int) -> tuple[float, float]:
        return prefill_seconds(step, load, budget, -(-n // flight), together)

    return cache(plain), cache(prompts)


def _at(rate: float, load: Load, most: int, budget: int | None, flight: int, plain: Plain, prompts: Prompts
        ) -> Rate | None:
    def prefill(n: int) -> tuple[float, float]:
        return prompts(n, waiting(rate / flight, in_a_step(load, most, budget, -(-n // flight)),
                                  lambda m: prompts(n, m)[1], plain(n) if budget is None else 0.0))

    def tpot(n: int) -> float:
        seconds, one = prefill(n)
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
    ttft = first_token(rate / flight, in_a_step(load, most, budget, -(-n // flight)), lambda m: prompts(n, m)[1],
                       prompts(n, 1)[0])
    gap = prefill(n)[1] + (plain(n) if budget is None else 0.0)
    return Rate(rate, ttft, at.tpot, gap, at.batch, f"pieces of {budget:,} tokens a step" if budget else
                "whole prompts between steps", budget)


def prefill_pool(step: StepSeconds, load: Load, after: float = 0.0, flight: int = 1) -> Rate:
    """The same of a server of prompts alone, with `after` seconds from there to the first token: what of the cache's
    transfer nothing hides."""
    amount("after", after)
    most, (_, prompts) = in_a_step(load, WHOLE, None, 0), _times(step, load, None, flight)

    def at(rate: float) -> Rate | None:
        ttft = first_token(rate / flight, most, lambda m: prompts(0, m)[1], prompts(0, 1)[0])
        return None if ttft == inf else Rate(rate, ttft + after, 0.0, 0.0, 0.0, "prompts alone")

    return _highest(at, load, flight / prompts(0, most)[0])


def decode_pool(step: StepSeconds, load: Load, most: int, flight: int = 1) -> Rate:
    """The same of a server of answers alone."""
    whole("most", most)
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
    amount("prefill", prefill)
    amount("decode", decode)
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
