"""Seconds from the call until a function has returned on N ranks in one process group: ours beside torch's own spawn.

first: in a process that has not launched before, torch imported.    warm: each later time, median of 5.
run: once more on ranks that stay, median of 20.                     torch spawn: torch.multiprocessing, median of 3.

    python bench/launch.py
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch.distributed as dist
import torch.multiprocessing as mp

from shardlab.launch import launch, ranks

RANKS = (1, 2, 4)


def where(group) -> int:
    return group.rank()


def seconds(call: Callable, repeats: int = 1) -> float:
    """The median time of `call` in seconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def torch_rank(rank: int, size: int, folder: str) -> None:
    """What a rank of ours does, for torch.multiprocessing: enter the group by a file, call the function."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    where(dist.group.WORLD)
    dist.barrier()  # or the first to leave cuts off one that is still connecting
    dist.destroy_process_group()


def torch_spawn(size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(torch_rank, (size, folder), nprocs=size)


def first(size: int) -> float:
    """The first launch of a fresh process."""
    run = subprocess.run([sys.executable, __file__, str(size)], capture_output=True, text=True, check=True)
    return float(run.stdout)


def main() -> None:
    print(f"seconds, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    print("ranks    first     warm      run    torch spawn")
    for size in RANKS:
        start = first(size)
        launch(where, size)
        warm = seconds(lambda n=size: launch(where, n), 5)
        with ranks(size) as r:
            r.run(where)
            stay = seconds(lambda pool=r: pool.run(where), 20)
        print(f"{size:5} {start:8.2f} {warm:8.3f} {stay:8.4f} {seconds(lambda n=size: torch_spawn(n), 3):14.2f}")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        print(seconds(lambda: launch(where, int(sys.argv[1]))))
    else:
        main()
