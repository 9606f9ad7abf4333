"""The verbs as the backend has them, on flat tensors: each returns the work under way and the result it will have."""

from __future__ import annotations

import torch
import torch.distributed as dist

from . import made
from .groups import name_of

REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN,
          "product": dist.ReduceOp.PRODUCT}
GLOO_ADDS = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8,
             torch.uint8}
# torch 2.13 renamed these two; the names before are deprecated there and the only ones before it
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Started = tuple[dist.Work, torch.Tensor]


def refuse(verb: str, x: torch.Tensor, op: str, transport: str) -> None:
    """Raise ValueError where the backend can't combine such tensors."""
    if transport == "gloo" and x.dtype not in GLOO_ADDS:
        made.refuse(verb, x, op)
        raise ValueError(f"gloo has no {verb} of {name_of(x.dtype)}: convert the tensor, "
                         "or take an algorithm that adds in torch, with comm.use('ring')")


def all_reduce(x: torch.Tensor, group, op: str) -> Started:
    return dist.all_reduce(x, REDUCE[op], group, async_op=True), x


def reduce_scatter(x: torch.Tensor, group, op: str, place: torch.Tensor | None = None) -> Started:
    out = x.new_empty(len(x) // group.size()) if place is None else place
    return _REDUCE_SCATTER(out, x, op=REDUCE[op], group=group, async_op=True), out


def reduce(x: torch.Tensor, group, op: str, root: int) -> Started:
    return dist.reduce(x, group_dst=root, op=REDUCE[op], group=group, async_op=True), x


def all_gather(x: torch.Tensor, group, place: torch.Tensor | None = None) -> Started:
    out = x.new_empty(len(x) * group.size()) if place is None else place
    return _ALL_GATHER(out, x, group=group, async_op=True), out


def all_to_all(x: torch.Tensor, group, given: list[int], taken: list[int]) -> Started:
    out = x.new_empty(sum(taken))
    return dist.all_to_all_single(out, x, taken, given, group, async_op=True), out


def broadcast(x: torch.Tensor, group, root: int) -> Started:
    return dist.broadcast(x, group_src=root, group=group, async_op=True), x


def gather(x: torch.Tensor, group, root: int) -> Started:
    out = x.new_empty(len(x) * group.size() if group.rank() == root else 0)
    pieces = list(out.tensor_split(group.size())) if group.rank() == root else None
    return dist.gather(x, pieces, group_dst=root, group=group, async_op=True), out


def scatter(x: torch.Tensor, group, root: int, whole: torch.Tensor | None) -> Started:
    pieces = list(whole.tensor_split(group.size())) if whole is not None else None
    return dist.scatter(x, pieces, group_src=root, group=group, async_op=True), x


def barrier(x: None, group) -> tuple[dist.Work, None]:
    return dist.barrier(group, async_op=True), None
