"""Data parallelism: every rank has the whole model and its own part of the batch; their gradients are added up.

Summed, not averaged: the loss owns the scale. Each rank divides the sum of its tokens' losses by the number of tokens
on all ranks (`loss.valid_tokens`), and what the ranks add up is the gradient of the whole batch's mean, however
unevenly the tokens are spread. A mean of the ranks' means would be another number.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature

import torch
import torch.distributed as dist
from torch import nn

from ..comm import ops, phase
from ..model.head import Head
from ..specs.rows import BUCKET
from . import grads
from .agreement import digest, travels_on
from .flat import buckets
from .reducer import Reducer, no_sync

__all__ = ["no_sync", "replicate"]


def replicate(model: nn.Module, group: dist.ProcessGroup, bucket_bytes: int = BUCKET) -> nn.Module:
    """Make `model` one of the group's replicas, in place, and return it.

    Every rank of the group calls it. Parameters and buffers become those of the group's first rank, however each has
    been seeded. From then on backward sums gradients over the group while it runs, in buckets of `bucket_bytes`; after
    it, call `grads.finish(model)`. To add up several passes, run all but the last inside `no_sync(model)`. A frozen
    parameter has no gradient; nor has one that no rank has used. Experts that are spread over the group (`expert.cut`)
    are left alone. Raises ValueError on a model that has a data axis, on ranks whose models differ in more than their
    weights, or hold other parts of one, and from then on in the backward of a loss without `valid`.
    """
    if hasattr(model, "reducer"):
        raise ValueError("this model has a data axis already: replicate the one without")
    if group.size() == 1:
        return model
    agree(model, group)
    count(model, group)
    spread = grads.spread(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter not in spread]
    model.reducer = Reducer(buckets(trained[::-1], 1, bucket_bytes), group)  # type: ignore[assignment]
    stay(model)
    return model


@torch.no_grad()
def agree(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Make parameters and buffers those of the group's first rank: one broadcast a tensor, none for those on meta.

    Raises ValueError, on all ranks, where their models differ in names, shapes, dtypes or in what is frozen.
    """
    first = dist.get_process_group_ranks(group)[0]
    spread = grads.spread(model)
    held = [(name, each) for name, each in model.named_parameters() if each not in spread] + [*model.named_buffers()]
    experts = [(name, each) for name, each in model.named_parameters() if each in spread]
    replicas = {each.partial for each in grads.marks(model).values() if each.spread and each.partial is not None}
    with phase("start"):
        _same(held, group)
        for those in replicas:
            _same(experts, those)
        for _, tensor in held:
            if not tensor.is_meta:
                ops.broadcast(tensor.detach(), first, group)


def _same(held: Sequence[tuple[str, torch.Tensor]], group: dist.ProcessGroup) -> None:
    """Raise ValueError, on all ranks, where they hold other tensors."""
    first, *others = dist.get_process_group_ranks(group)
    kinds = [(name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad, getattr(tensor, "window", None))
             for name, tensor in held]
    told = [len(held), sum(tensor.requires_grad for _, tensor in held), sum(tensor.numel() for _, tensor in held),
            digest(repr(kinds).encode())]
    ours, *theirs = ops.all_gather(torch.tensor([told], device=travels_on(group)), group).tolist()
    for rank, other in zip(others, theirs, strict=True):
        if other != ours:
            raise ValueError(f"rank {rank} has another model than rank {first}, in names, shapes, dtypes, in what is "
                             f"frozen or which parts it holds: {_described(other)}, not {_described(ours)}; build the "
                             "same on all, and replicate it over ranks with the same parts")


def _described(told: list[int]) -> str:
    return "{} tensors, {} trained, of {:,} numbers".format(*told)


def stay(model: nn.Module) -> None:
    """Have `model.to(…)`, `.half()` and the like raise RuntimeError where they would take parameters out of the rows
    that are sent."""
    move = model._apply

    def refuse(fn, *args, **kwargs):
        one = next(model.parameters(), None)
        if one is not None and fn(one) is not one:
            raise RuntimeError("this model has a data axis, whose rows its parameters lie in: move or convert it "
                               "before it is replicated or sharded")
        return move(fn, *args, **kwargs)

    model._apply = refuse  # type: ignore[method-assign]


def count(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Have the backward of the model's loss insist on `valid`: the sum of the ranks' means is no mean."""

    def refuse(_):
        raise ValueError(f"gradients are summed over {group.size()} ranks, so divide the loss by the tokens of all: "
                         "model.loss(tokens, labels, valid), with valid = loss.valid_tokens([labels], group)")

    def look(head, args, kwargs, result):
        given = signature(head.forward).bind(*args, **kwargs).arguments
        if result.requires_grad and given.get("labels") is not None and given.get("valid") is None:
            result.register_hook(refuse)

    for module in model.modules() if group.size() > 1 else ():
        if isinstance(module, Head):
            module.register_forward_hook(look, with_kwargs=True)
