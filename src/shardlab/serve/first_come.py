"""A server that takes one request after another: what a rate that drifts does to those who wait."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from ..specs.check import whole

# (prompt tokens, seconds): Llama-2-70B in fp16 on 8 H100s, tp = 8, one prompt at a time. Medians of data/perf_model.csv
# in github.com/Mutinifni/splitwise-sim (MIT), to the millisecond
SPLITWISE_H100_TP8 = ((512, 0.053), (1024, 0.078), (2048, 0.137), (4096, 0.390), (8192, 0.845))


def first_come(arrivals: Sequence[float], service: Sequence[float], servers: int = 1) -> list[float]:
    """Seconds that each request waits before one of `servers` is free for it, first come, first served.

    `arrivals` in order and `service`, how long each takes, in seconds. Raises ValueError where they are not in order.
    """
    free = [0.0] * whole("servers", servers)  # when each is: a heap
    waits, last = [], 0.0
    for arrival, seconds in zip(arrivals, service, strict=True):
        if arrival < last:
            raise ValueError(f"an arrival at {arrival} s after one at {last} s: give them in order")
        last = arrival
        waits.append(max(0.0, free[0] - arrival))
        heapq.heapreplace(free, arrival + waits[-1] + seconds)
    return waits


def prompt_seconds(lengths: Sequence[int], points: Sequence[tuple[int, float]] = SPLITWISE_H100_TP8) -> list[float]:
    """Seconds of prefill for prompts of these lengths: on straight lines between measured `points`, and level before
    the first and after the last."""
    sizes, seconds = np.array(points).T
    return np.interp(lengths, sizes, seconds).tolist()
