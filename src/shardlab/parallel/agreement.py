"""Whether ranks are about to do the same: each says in one number what it would, and they compare. And what else they
tell each other: a few words, or that one of them has failed."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist

from ..comm import ops

KINDS = {kind.__name__: kind for kind in (ValueError, TypeError, OSError, FileExistsError, FileNotFoundError,
                                          PermissionError)}


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


def told(value: Any, group: dist.ProcessGroup, device: torch.device | None = None) -> list:
    """What each rank of the group says, in their order: anything that JSON can say."""
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = ops.all_gather(torch.tensor(len(text), device=device), group)
    padded = torch.zeros(int(sizes.max()), dtype=torch.uint8, device=device)
    padded[: len(text)] = text
    rows = ops.all_gather(padded, group).view(len(sizes), -1)
    return [json.loads(bytes(row[:size].tolist())) for row, size in zip(rows, sizes.tolist(), strict=True)]


def together(failure: Exception | None, what: str) -> None:
    """Raise on all ranks where one has failed, so that none goes on alone and waits for it: its own error there, on the
    others one of the same kind (a RuntimeError, if it is none of `KINDS`) that says which rank could not do `what`, and
    why. All ranks call it."""
    if dist.is_initialized():
        own = None if failure is None else (type(failure).__name__, str(failure))
        world: dist.ProcessGroup = dist.group.WORLD  # type: ignore[assignment]
        said = told(own, world, travels_on(world))
        rank = next((rank for rank, each in enumerate(said) if each is not None), None)
        if failure is None and rank is not None:
            kind, text = said[rank]
            raise KINDS.get(kind, RuntimeError)(f"rank {rank} could not {what}: {text}")
    if failure is not None:
        raise failure
