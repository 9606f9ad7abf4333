"""When requests come: times in seconds from the start of a run, pure functions of a seed.

Nobody waits for an answer before asking, so times don't depend on what is served (an open loop).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..specs.check import number, whole


def draws(seed: int, what: str) -> np.random.Generator:
    """Random numbers of a seed, others for each `what` that is drawn: gaps have nothing to do with lengths."""
    return np.random.default_rng([whole("seed", seed, least=0), *what.encode()])


def gamma(rate: float, cv: float, count: int, seed: int = 0) -> list[float]:
    """`count` arrivals at `rate` a second, gaps gamma-distributed with a coefficient of variation `cv`.

    `cv` is standard deviation over mean: 0 is evenly spaced, 1 is Poisson, and above that they come in bursts. Raises
    ValueError on one that is neither 0 nor between 0.001 and 1000.
    """
    rate, count = number("rate", rate), whole("count", count)
    if cv == 0:
        return [(i + 1) / rate for i in range(count)]
    if not 1e-3 <= number("cv", cv) <= 1e3:
        raise ValueError(f"cv = {cv:g}: give 0 for even gaps, or a number from 0.001 to 1000")
    shape = 1 / cv**2
    return np.cumsum(draws(seed, "gaps").gamma(shape, 1 / (shape * rate), count)).tolist()


def poisson(rate: float, count: int, seed: int = 0) -> list[float]:
    """`count` arrivals at `rate` a second that know nothing of one another: gaps are exponential."""
    return gamma(rate, 1.0, count, seed)


def drifting(rates: Sequence[float], seconds_each: float, seed: int = 0) -> list[float]:
    """Poisson arrivals whose rate is each of `rates`, a second, for `seconds_each` in turn; how many is chance too.

    At the rate r time runs r times as fast: arrivals at rate 1 are put back from there (a change of time, Çınlar,
    Introduction to Stochastic Processes, 1975, ch. 4). Raises ValueError on a rate below 0 and where all are 0.
    """
    each = number("seconds_each", seconds_each)
    if not len(rates) or min(rates) < 0 or not 0 < sum(rates) < float("inf"):
        raise ValueError(f"rates must be 0 or above, a second, and one of them above 0, not {list(rates)}")
    expected = np.concatenate([[0.0], np.cumsum(np.asarray(rates, float) * each)])  # arrivals until each change
    generator, total = draws(seed, "gaps"), float(expected[-1])
    faster = np.sort(generator.uniform(0, total, generator.poisson(total)))  # that many, and then anywhere
    return np.interp(faster, expected, each * np.arange(len(rates) + 1)).tolist()


def mean_rate(arrivals: Sequence[float]) -> float:
    """Arrivals a second: gaps over the time from the first to the last, so that it does not matter when a run began.

    Raises ValueError where there are no two at different times.
    """
    if not len(arrivals) or not (span := max(arrivals) - min(arrivals)):
        raise ValueError(f"{len(arrivals)} arrivals, all at one time, have no rate: give two at different times")
    return (len(arrivals) - 1) / span
