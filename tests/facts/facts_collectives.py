"""What collectives cost: closed forms, bandwidths as nccl-tests defines them, and what tokens and experts send."""

from facts import GIB, KIB, MS, US, V3
from facts_cutting import A100, LAYER

from shardlab.cost import algbw, busbw, collective_seconds, crossover, serial_bytes, wire
from shardlab.specs import LinkSpec, find_link

LINK = LinkSpec(name="alpha of 1 µs", per_direction=450e9, alpha=1e-6)  # NVLink 4's rate
SYNCS = sum(c.count for c in LAYER)
READ = int(16 * GIB / A100.hbm / MS)  # the claim's whole milliseconds of reading, and of 160 collectives
FEW, MANY = (round(SYNCS * each * US / MS) for each in (6, 12.5))


def all_reduce(algorithm, nbytes):
    """Microseconds among eight ranks."""
    return collective_seconds("all_reduce", algorithm, nbytes, 8, LINK) / US


def factor(op):
    return busbw(op, 1, 8, 1) / algbw(op, 1, 8, 1)


def copies(ranks):
    """Bytes that a rank sends of one token of DeepSeek-V3's in FP8, if it goes to so many other ranks."""
    splits = [[0] + [V3.hidden] * ranks] + [[0] * (ranks + 1)] * ranks
    return wire("all_to_all", "pairwise", 0, 1, ranks + 1, 0, splits=splits)


COMPUTED = {
    "A002-lat-lo": lambda: SYNCS * 6 * US / MS,
    "A002-lat-hi": lambda: SYNCS * 12.5 * US / MS,
    "A002-share-lo": lambda: FEW / (FEW + READ),
    "A002-share-hi": lambda: MANY / (MANY + READ),
    "A002-internode": lambda: 20 * MS / SYNCS / US,
    "B7-busbw-allreduce": lambda: factor("all_reduce"),
    "B7-busbw-alltoall": lambda: factor("all_to_all"),
    "B7-busbw-broadcast": lambda: factor("broadcast"),
    "B7-busbw-reduce": lambda: factor("reduce"),
    "B7-busbw-size": lambda: algbw("all_gather", GIB, 8, 1),
    "B7-16k-recdbl": lambda: all_reduce("doubling", 16 * KIB),
    "B7-16k-rabenseifner": lambda: all_reduce("halving", 16 * KIB),
    "B7-1g-ring": lambda: all_reduce("ring", GIB),
    "B7-1g-recdbl": lambda: all_reduce("doubling", GIB),
    "B7-1g-rabenseifner": lambda: all_reduce("halving", GIB),
    "B7-1g-tree": lambda: all_reduce("tree", GIB),
    "B7-crossover": lambda: crossover("all_reduce", "ring", "doubling", 8, LINK),
    "B7-ring-grows": lambda: serial_bytes("all_reduce", "ring", 1, 64) / serial_bytes("all_reduce", "ring", 1, 2),
    "B7-16k-ring": lambda: all_reduce("ring", 16 * KIB),
    "B7-allgather-limit": lambda: serial_bytes("all_gather", "ring", GIB / 8, 8) / LINK.per_direction / MS,
    "B7-a2a-v3": lambda: copies(V3.experts.active),
    "B7-a2a-v3-ib": lambda: copies(4),  # to four nodes at most
    "B7-13experts": lambda: 4 * 160e9 / find_link("ib-ndr").per_direction,  # NVLink at the 160 GB/s that they reached
}
