"""Queues in closed form: how long one waits, how many are inside, and the batch at which a service keeps pace.

Service times of a batch depend on the batch, and the batch on service times: λ · O · TPOT(B) = B is a fixed point to be
found, not a multiplication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..specs.check import number, whole

Work = Sequence[tuple[int, int]]  # of one step: (new tokens, context, the new ones included) of each request
StepSeconds = Callable[[Work], float]


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
    with n requests at once, 1 to `most`; between whole numbers it is taken to be straight. Searched by halving: B /
    TPOT(B) must grow with B, as it does where a step costs something by itself and each request something more. Where
    there is none, `limit` is "speed": see `steady`."""
    def enough(n: int) -> bool:
        return tokens * tpot(n) <= n

    whole("most", most)
    at_most = most / tpot(most)
    if not enough(most):
        return Steady(None, None, at_most, most, "speed")
    few, many = 1, most
    while few < many:
        half = (few + many) // 2
        few, many = (few, half) if enough(half) else (half + 1, many)
    here = tpot(many)
    if many == 1:
        return Steady(tokens * here, here, at_most, most)
    before = tpot(many - 1)
    slope = here - before
    batch = tokens * (before - (many - 1) * slope) / (1 - tokens * slope)
    return Steady(batch, before + (batch - many + 1) * slope, at_most, most)


def steady(rate: float, answer: int, step: StepSeconds, *, context: int, most: int, prefill: float = 0.0,
           flight: int = 1) -> Steady:
    """The batch at which a server keeps pace with `rate` requests a second for `answer` tokens each.

    `step` is the time of a step, and each of a decoding step's requests has a context of `context` tokens on average;
    `most` of them fit at once. `prefill` seconds of every request the server is busy otherwise (its own prompts, where
    they are not another server's). `flight` batches are under way at once, one in each stage of a pipeline. Nothing is
    random here: a mean, around which a real batch goes up and down. Raises ValueError on numbers that are not above 0,
    and where prompts alone keep the server busy.
    """
    busy = number("rate", rate) * prefill
    if prefill and busy >= 1:
        return Steady(None, None, 0.0, most, "speed")
    whole("answer", answer)
    work = (1, whole("context", context))

    def tpot(n: int) -> float:
        return step([work] * -(-n // flight)) / (1 - busy)

    found = fixed_point(rate * answer, tpot, most)
    if found.batch is None and rate * answer * tpot(MORE * most) <= MORE * most:
        return found._replace(limit="memory")
    return found
