"""Our collectives beside gloo's own, on the same tensors in one run: through shared memory, and as rings over gloo.

Time of each ÷ time of gloo's own, ordinary tensors, the result in new memory with either; medians of the slowest rank,
the ways taking turns, short calls several in a row. With more ranks than cores gloo's latency is the scheduler's.
Below: what the machine copies, and what the ledger costs.

    python bench/comm.py [ranks …]        2 4 8 when left out
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from shardlab import comm
from shardlab.comm.mark import Mark
from shardlab.launch import launch
from shardlab.specs.units import binary

TIMED = {2**10: (9, 20), 2**16: (9, 20), 2**20: (9, 4), 2**26: (5, 1)}  # bytes: (times, calls in a row in each)
WAYS = {"shm": {"transport": "shm"}, "ring": {"algorithm": "ring"}}
TARGETS = {  # at most so much of gloo's time, for the sizes in bytes
    ("all_reduce", "shm"): {2**10: 0.3, 2**16: 0.3, 2**20: 0.3, 2**26: 0.4}, ("all_reduce", "ring"): {2**26: 1.1},
    ("reduce_scatter", "shm"): {2**20: 0.3, 2**26: 0.3}, ("reduce_scatter", "ring"): {2**26: 0.5},
    ("all_gather", "shm"): {2**20: 0.3, 2**26: 0.3}, ("all_gather", "ring"): {2**26: 0.5},
}


def calls(op: str, size: int, group) -> dict[str, Callable[[], object]]:
    """The op by gloo's own and each of our ways; `size` is the bytes of the whole tensor, an all-gather's result."""
    p = group.size()
    whole, part = torch.ones(size // 4), torch.ones(size // 4 // p)
    gloo = {"all_reduce": lambda: dist.all_reduce(whole, group=group),
            "reduce_scatter": lambda: dist.reduce_scatter_single(torch.empty_like(part), whole, group=group),
            "all_gather": lambda: dist.all_gather_single(torch.empty_like(whole), part, group=group)}[op]
    ours = {"all_reduce": lambda: comm.all_reduce(whole, group=group),
            "reduce_scatter": lambda: comm.reduce_scatter(whole, group=group),
            "all_gather": lambda: comm.all_gather(part, group)}[op]

    def by(way: str) -> Callable[[], None]:
        def call() -> None:
            with comm.use(**WAYS[way]):
                ours()
        return call

    return {"gloo": gloo} | {way: by(way) for way in WAYS}


def measured(group, op: str, size: int) -> dict[str, float]:
    """{way: seconds of a call}: the median of the slowest rank."""
    ways = calls(op, size, group)
    rounds, row_of = TIMED[size]
    times = torch.zeros(len(ways), rounds)
    for i in range(-1, rounds):  # the first round warms up
        for row, call in enumerate(ways.values()):
            dist.barrier(group)
            start = time.perf_counter()
            for _ in range(row_of):
                call()
            times[row, max(i, 0)] = (time.perf_counter() - start) / row_of
    dist.all_reduce(times, dist.ReduceOp.MAX, group)
    return dict(zip(ways, times.median(1).values.tolist(), strict=True))


def copies(group) -> tuple[float, float]:
    """Bytes a second that one rank copies alone, and each of all at once; 64 MiB, past the caches."""
    source, target = torch.ones(2**24), torch.ones(2**24)

    def rate() -> float:
        start = time.perf_counter()
        for _ in range(8):
            target.copy_(source)
        return 8 * source.nbytes / (time.perf_counter() - start)

    dist.barrier(group)
    alone = rate() if group.rank() == 0 else 0.0
    dist.barrier(group)
    return alone, rate()


def ledger(group) -> tuple[float, float]:
    """Processor seconds of a call's marks without a ledger, and what an open ledger adds: the least of nine."""
    x = torch.ones(4, 8)

    def seconds() -> float:
        start = time.thread_time()
        for _ in range(2000):
            mark = Mark("all_reduce", x, group, "(sum)")
            mark.enter()
            mark.goes("", "gloo", False)
            mark.leave()
        return (time.thread_time() - start) / 2000

    without = min(seconds() for _ in range(9))
    recorded = []
    for _ in range(9):
        with comm.record():
            recorded.append(seconds())
    return without, min(recorded) - without


def main(worlds: list[int]) -> None:
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; time ÷ gloo's own\n")
    print(f"{'':33} {'gloo':>10}   {'shm':>6} {'aim':>8}   {'ring':>6} {'aim':>8}       aim: at most so much of gloo's")
    missed = []
    for p in worlds:
        for op in ("all_reduce", "reduce_scatter", "all_gather"):
            for size in TIMED:
                times = launch(measured, p, op, size, backend="gloo", timeout=300)[0]
                cells = ""
                for way in WAYS:
                    target, ratio = TARGETS[op, way].get(size), times[way] / times["gloo"]
                    cells += f"   {ratio:6.2f} {target or '':>8}"
                    if target and ratio > target:
                        missed.append(f"{p} ranks, {op}, {binary(size)}, {way}: {ratio:.2f} for {target}")
                print(f"{p} ranks  {op:15} {binary(size):>8} {1e3 * times['gloo']:8.2f} ms{cells}")
        alone, each = launch(copies, p, backend="gloo")[0]
        print(f"{p} ranks  copying: {alone / 1e9:.1f} GB/s one alone, {each / 1e9:.1f} GB/s each of all at once\n")
    print("\n".join(["over their aim:", *missed, ""] if missed else ["no aim is missed\n"]))
    marks, entry = launch(ledger, 1, backend="gloo")[0]
    print(f"marking a call: {1e6 * marks:.1f} µs of processor time; a ledger adds {1e6 * entry:.1f} µs (aim: under 5)")


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or [2, 4, 8])
