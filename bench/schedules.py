"""How fast a schedule is made, proved and priced: 64 stages, 512 micro-batches.

Processor time of the three calls, the least of several runs: a shared machine's clock tells of others, and its
processors are slower while others use them.

    python bench/schedules.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from shardlab.cost import timeline
from shardlab.schedule import SCHEDULES, check

LIMIT, REPEATS = 2.0, 4
# (ranks, micro-batches, chunks) that make 64 stages; the last two, 128 stages and twice the passes, are beyond the aim
ROWS: list[tuple[str, str, tuple[int, ...]]] = [
    ("gpipe", "64 ranks", (64, 512)),
    ("1f1b", "64 ranks", (64, 512)),
    ("zero_bubble", "64 ranks", (64, 512)),
    ("interleaved", "32 ranks, 2 chunks", (32, 512, 2)),
    ("dualpipe_v", "32 ranks", (32, 512)),
    ("dualpipe", "64 ranks", (64, 512)),
    ("interleaved", "64 ranks, 2 chunks: 128 stages", (64, 512, 2)),
    ("dualpipe_v", "64 ranks: 128 stages", (64, 512)),
]


def seconds(function: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    """(Processor seconds, result) of a call."""
    start = time.process_time()
    result = function(*args)
    return time.process_time() - start, result


def once(name: str, sizes: tuple[int, ...]) -> tuple[list[float], int]:
    """Seconds to make, prove and price the schedule, and how many actions it has."""
    made, orders = seconds(SCHEDULES[name], *sizes)
    proved, _ = seconds(check, orders)
    priced, _ = seconds(lambda: timeline(orders).bubble_over_total)
    return [made, proved, priced], sum(map(len, orders))


def main() -> None:
    print(f"{'schedule':13}{'':32}{'actions':>9}{'made':>8}{'proved':>8}{'priced':>8}{'all':>8}   (aim: {LIMIT} s)")
    for name, note, sizes in ROWS:
        parts, actions = min((once(name, sizes) for _ in range(REPEATS)), key=lambda run: sum(run[0]))
        parts = [*parts, sum(parts)]
        print(f"{name:13}{note:32}{actions:>9,}" + "".join(f"{part:>8.2f}" for part in parts), flush=True)


if __name__ == "__main__":
    main()
