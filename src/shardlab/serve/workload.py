"""Requests to try a server with: drawn, stretched to another rate, and given out when each is due."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..specs.check import number, whole
from .arrivals import draws, drifting, mean_rate
from .request import Request

AFTERNOON = (5.0, 5.0, 5.0, 5.0, 5.0, 5.0, 7.5, 10.4, 10.4, 4.5, 4.0, 4.0)  # requests/s, each for five minutes


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths in tokens, lognormal: many short and few long. `cv` is their standard deviation over their mean.

    From 1 to `most`: what is longer is cut, so that the mean which comes out is a little less.
    """

    mean: float
    cv: float
    most: int = 8192

    def draw(self, count: int, generator: np.random.Generator) -> list[int]:
        variance = float(np.log1p(number("cv", self.cv) ** 2))
        drawn = generator.lognormal(np.log(number("mean", self.mean)) - variance / 2, variance**0.5, count)
        return np.clip(np.rint(drawn), 1, whole("most", self.most)).astype(int).tolist()


def synthetic(arrivals: Sequence[float], prompts: int | Sequence[int] | Lengths,
              new_tokens: int | Sequence[int] | Lengths, vocab: int, seed: int = 0, prefixes: int = 0,
              shared: int = 0) -> list[Request]:
    """A request for each of `arrivals`, with random tokens below `vocab` in its prompt.

    `prompts` and `new_tokens` are lengths: one for all, one for each, or a distribution of them. With `prefixes` each
    prompt begins with the `shared` tokens of one of so many, drawn evenly (a prompt that is shorter, with a part of
    it), so that a cache of prefixes has something to find. Prompts are arrays, of 4 bytes a token. Raises ValueError
    where lengths are not as many as arrivals.
    """
    count, generator = len(arrivals), draws(seed, "tokens")
    ins, outs = _lengths("prompts", prompts, count, seed), _lengths("new_tokens", new_tokens, count, seed)
    if bool(prefixes) != bool(shared):
        raise ValueError(f"{prefixes} prefixes of {shared} tokens are none: give both numbers or neither")
    common = [tokens(generator, shared, vocab) for _ in range(prefixes)] or [array("i")]
    which = draws(seed, "prefixes").integers(0, len(common), count).tolist()
    requests = []
    for i, (arrival, length, new) in enumerate(zip(arrivals, ins, outs, strict=True)):
        begin = common[which[i]][:length]
        requests.append(Request(i, begin + tokens(generator, length - len(begin), vocab), new, arrival))
    return requests


def afternoon(vocab: int, seed: int = 0) -> list[Request]:
    """An hour of about 21,000 requests whose rate drifts: 5.8/s on average, 10.4/s for ten minutes of it.

    Its mean rate, its peak and the lengths (means and coefficients of variation, drawn lognormal) are much like those
    of the Azure conversation trace of 2023 (Patel et al., Splitwise, ISCA 2024); nothing in it is from the trace.
    """
    arrivals = drifting(AFTERNOON, 300.0, seed)
    return synthetic(arrivals, Lengths(1155, 0.96), Lengths(211, 0.77, most=1000), vocab, seed)


def tokens(generator: np.random.Generator, count: int, vocab: int) -> array[int]:
    """So many random token ids below `vocab`."""
    return array("i", generator.integers(0, whole("vocab", vocab), count, dtype=np.int32).tobytes())


def _lengths(name: str, given: int | Sequence[int] | Lengths, count: int, seed: int) -> Sequence[int]:
    if isinstance(given, Lengths):
        return given.draw(count, draws(seed, name))
    every = given if isinstance(given, Sequence) else [given] * count
    if len(every) != count:
        raise ValueError(f"{len(every)} lengths in {name} for {count} arrivals: give one number, or one for each")
    return [whole(name, length) for length in every]


def rescale(requests: Sequence[Request], rate: float) -> list[Request]:
    """The same requests at another mean rate, in requests a second: all times stretched by one factor.

    Bursts stay bursts. Raises ValueError where all are due at one time.
    """
    factor = mean_rate([request.arrival for request in requests]) / number("rate", rate)
    return [replace(request, arrival=request.arrival * factor) for request in requests]


def first(requests: Sequence[Request], count: int) -> list[Request]:
    """The `count` that are due first (all, if there are fewer), in that order."""
    return sorted(requests, key=lambda request: request.arrival)[: whole("count", count)]
