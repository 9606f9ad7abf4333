"""How long a message takes here: the samples that α and β are fitted to."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from ..specs.check import whole
from .groups import group_of, members
from .ops import barrier, broadcast
from .p2p import recv, send


def half_round_trips(group, sizes: Sequence[int], repeats: int = 5) -> list[tuple[int, float]]:
    """[(bytes, seconds)] for each of `sizes`: half the time of a message from rank 0 of the group to rank 1 and back.

    The shortest of `repeats`, after one that is not counted, since what disturbs a message only adds to its time. All
    ranks must call it, and all get the same. Raises ValueError on a group of one rank, and on sizes below 1 byte.
    """
    group, sizes = group_of(group), [whole("a size in bytes", size) for size in sizes]
    whole("repeats", repeats)
    if group.size() < 2:
        raise ValueError("a message needs two ranks, and the group has one")
    seconds = torch.zeros(len(sizes), dtype=torch.float64)
    first, second, *_ = members(group).ranks
    for i, size in enumerate(sizes):
        x = torch.zeros(size, dtype=torch.uint8)
        barrier(group)
        if group.rank() < 2:
            times = [_there_and_back(x, group, (second, first)[group.rank()]) for _ in range(repeats + 1)]
            seconds[i] = min(times[1:]) / 2
    return list(zip(sizes, broadcast(seconds, first, group).tolist(), strict=True))


def _there_and_back(x: torch.Tensor, group, other: int) -> float:
    start = time.perf_counter()
    if group.rank() == 0:
        send(x, other, group)
        recv(x, other, group)
    else:
        recv(x, other, group)
        send(x, other, group)
    return time.perf_counter() - start
