"""Data parallelism: every rank has the whole model and its own part of the batch; their gradients are added up.

Summed, not averaged: the loss owns the scale. Each rank divides the sum of its tokens' losses by the number of tokens
on all ranks (`loss.valid_tokens`), and what the ranks add up is the gradient of the whole batch's mean, however
unevenly the tokens are spread. A mean of the ranks' means would be another number.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from ..comm import ops, phase
from ..specs.rows import BUCKET
from .flat import buckets
from .reducer import Reducer, no_sync

__all__ = ["no_sync", "replicate"]


def replicate(model: nn.Module, group: dist.ProcessGroup, bucket_bytes: int = BUCKET) -> nn.Module:
    """Make `model` one of the group's replicas, in place, and return it.

    Every rank of the group calls it. Parameters and buffers become those of the group's first rank, however each has
    been seeded. From then on backward sums gradients over the group while it runs, in buckets of `bucket_bytes`; after
    it, call `grads.finish(model)`. To add up several passes, run all but the last inside `no_sync(model)`. A frozen
    parameter has no gradient; nor has one that no rank has used. Raises ValueError on a model that has a data axis.
    """
    if hasattr(model, "reducer"):
        raise ValueError("this model has a data axis already: replicate the one without")
    if group.size() == 1:
        return model
    agree(model, group)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.reducer = Reducer(buckets(trained[::-1], 1, bucket_bytes), group)  # type: ignore[assignment]
    return model


@torch.no_grad()
def agree(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Make parameters and buffers those of the group's first rank: one broadcast a tensor, none for those on meta."""
    first = dist.get_process_group_ranks(group)[0]
    with phase("start"):
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta:
                ops.broadcast(tensor.detach(), first, group)
