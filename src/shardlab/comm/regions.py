"""Collectives that autograd goes through: each with its conjugate as backward.

A tensor is, on the ranks of a group, either *whole* (the same on each), a *slice* of the whole, or a *part* of a sum.
Backward turns each around: where forward copies, gradients are parts and must be summed; where forward sums, the
gradient is already whole.

| verb              | forward             | takes → gives   | backward            |
|-------------------|---------------------|-----------------|---------------------|
| `copy_to`         | nothing             | whole → whole   | all-reduce          |
| `reduce_from`     | all-reduce          | parts → whole   | nothing             |
| `scatter_to`      | take own slice      | whole → slice   | all-gather          |
| `gather_from`     | all-gather          | slice → whole   | take own slice      |
| `all_gather`      | all-gather          | slice → whole   | reduce-scatter      |
| `reduce_scatter`  | reduce-scatter      | parts → slice   | all-gather          |
| `all_to_all`      | all-to-all          | rows → rows     | all-to-all, back    |

`gather_from` is for what every rank goes on to use in the same way (its gradient is whole already), `all_gather` for
what each rank uses differently (its gradients are parts). The first two are Megatron-LM's f and g (arXiv:1909.08053,
§3), the next two their analogues along a dim; the last two are sequence parallelism's (arXiv:2205.05198, §4.2.2).
On a group of one rank each returns its input. `all_to_all` hands rows on, and their gradients come back the same way.
`reduce_from_` is `reduce_from` in place, without the copy.
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from . import ops


def copy_to(x: torch.Tensor, group) -> torch.Tensor:
    """Enter a parallel region: `x` unchanged, its gradient summed over the group."""
    return _region(x, group, 0, _same, _sum)


def reduce_from(x: torch.Tensor, group) -> torch.Tensor:
    """Leave a parallel region: the sum of all ranks' `x`, its gradient unchanged."""
    return _region(x, group, 0, _sum, _same)


def reduce_from_(x: torch.Tensor, group) -> torch.Tensor:
    """Leave a parallel region in place: `x` itself becomes the sum. Nothing else may have kept it for backward."""
    return x if group.size() == 1 else _SumInPlace.apply(x, group)


def scatter_to(x: torch.Tensor, group, dim: int = -1) -> torch.Tensor:
    """This rank's equal slice of `x` along `dim`. Raises ValueError where the group does not divide the dim."""
    return _region(x, group, dim, _slice, _join)


def gather_from(x: torch.Tensor, group, dim: int = -1) -> torch.Tensor:
    """All ranks' `x` joined along `dim`; every rank must use the result in the same way."""
    return _region(x, group, dim, _join, _slice)


def all_gather(x: torch.Tensor, group, dim: int = 0) -> torch.Tensor:
    """All ranks' `x` joined along `dim`; ranks may use the result differently."""
    return _region(x, group, dim, _join, _sum_slice)


def reduce_scatter(x: torch.Tensor, group, dim: int = 0) -> torch.Tensor:
    """This rank's equal slice along `dim` of the sum of all ranks' `x`. Raises ValueError as `scatter_to` does."""
    return _region(x, group, dim, _sum_slice, _join)


def all_to_all(x: torch.Tensor, given: list[int], taken: list[int], group) -> torch.Tensor:
    """Rows of `x` (sum of given, …) to every rank, given[r] to rank r; theirs joined in rank order: (sum of taken, …).

    With gradients on, backward comes by on every rank, whatever this one's rows are and whether there are any: ranks
    whose neighbours need no gradient send them all the same.
    """
    if group.size() == 1:
        return x
    return _AllToAll.apply(x, torch.zeros((), requires_grad=True), given, taken, group)


def _region(x, group, dim, there, back):
    if group.size() == 1:
        return x
    if not -x.dim() <= dim < max(1, x.dim()):
        raise ValueError(f"{tuple(x.shape)} has no dim {dim}")
    return _Region.apply(x, group, dim, there, back)


class _Region(torch.autograd.Function):
    """`there` on the way forward, `back` on the way back: each takes a tensor, the group and the dim."""

    @staticmethod
    def forward(ctx, x, group, dim, there, back):
        ctx.way_back = lambda grad: back(grad, group, dim)
        return there(x, group, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return ctx.way_back(grad), None, None, None, None


class _SumInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.mark_dirty(x)
        return ops.all_reduce(x, group=group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, always, given, taken, group):
        ctx.back = taken, given, group
        return ops.all_to_all(x, given, taken, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return ops.all_to_all(grad, *ctx.back), None, None, None, None


def _same(x, group, dim):
    return x.view_as(x)


def _sum(x, group, dim):
    # of a copy, since x is the caller's and must not change under it
    return ops.all_reduce(x.clone(memory_format=torch.contiguous_format), group=group)


def _join(x, group, dim):
    if dim in (0, -x.dim()):
        return ops.all_gather(x, group)
    return ops.all_gather(x.transpose(0, dim), group).transpose(0, dim).contiguous()


def _slice(x, group, dim):
    size, p = x.shape[dim], group.size()
    if size % p:
        raise ValueError(f"dim {dim} of {tuple(x.shape)} does not divide over {p} ranks: pad it to a multiple of {p}")
    return x.narrow(dim, group.rank() * (size // p), size // p).contiguous()


def _sum_slice(x, group, dim):
    if dim in (0, -x.dim()):
        return ops.reduce_scatter(x, group=group)
    return ops.reduce_scatter(x.transpose(0, dim), group=group).transpose(0, dim).contiguous()
