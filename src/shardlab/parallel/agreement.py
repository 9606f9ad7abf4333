"""Whether ranks are about to do the same: each says in one number what it would, and they compare."""

from __future__ import annotations

from hashlib import blake2b

import torch
import torch.distributed as dist

from ..comm import ops


def differing(plan: bytes, group: dist.ProcessGroup) -> int | None:
    """The first rank of the group whose `plan` is not that of the group's first rank, or None: the same on all ranks,
    which all call it."""
    if group.size() == 1:
        return None
    first, *others = ops.all_gather(torch.tensor([digest(plan)], device=travels_on(group)), group).tolist()
    ranks = dist.get_process_group_ranks(group)[1:]
    return next((rank for rank, other in zip(ranks, others, strict=True) if other != first), None)


def digest(plan: bytes) -> int:
    """A number of 64 bits that another plan hardly has."""
    return int.from_bytes(blake2b(plan, digest_size=8).digest(), "little", signed=True)


def travels_on(group: dist.ProcessGroup) -> torch.device:
    """Where a number must be to travel in the group."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def agree(plan: bytes, group: dist.ProcessGroup, does: str) -> None:
    """Raise ValueError, on all ranks, where one has another plan: what they would come to is no model's. `does` is what
    a rank does by it, as in "rank 1 runs otherwise than rank 0"."""
    if (rank := differing(plan, group)) is not None:
        raise ValueError(f"rank {rank} {does} otherwise than rank {dist.get_process_group_ranks(group)[0]}: give all "
                         "ranks the same model, schedule, weights and micro-batches")
