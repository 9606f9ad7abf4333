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

`gather_from` is for what every rank goes on to use in the same way (its gradient is whole already), `all_gather` for
what each rank uses differently (its gradients are parts). The first two are Megatron-LM's f and g (arXiv:1909.08053,
§3), the next two their analogues along a dim; the last two are sequence parallelism's (arXiv:2205.05198, §4.2.2).
On a group of one rank each returns its input.
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from . import ops


def copy_to(x: torch.Tensor, group) -> torch.Tensor:
    """Enter a parallel region: `x` unchanged, its gradient summed over the group."""
    return _Copy.apply(x, group) if group.size() > 1 else x


def reduce_from(x: torch.Tensor, group) -> torch.Tensor:
    """Leave a parallel region: the sum of all ranks' `x`, its gradient unchanged."""
    return _Reduce.apply(x, group) if group.size() > 1 else x


def scatter_to(x: torch.Tensor, group, dim: int = -1) -> torch.Tensor:
    """This rank's equal slice of `x` along `dim`. Raises ValueError where the group does not divide the dim."""
    return _Scatter.apply(x, group, dim) if group.size() > 1 else x


def gather_from(x: torch.Tensor, group, dim: int = -1) -> torch.Tensor:
    """All ranks' `x` joined along `dim`; every rank must use the result in the same way."""
    return _Gather.apply(x, group, dim) if group.size() > 1 else x


def all_gather(x: torch.Tensor, group, dim: int = 0) -> torch.Tensor:
    """All ranks' `x` joined along `dim`; ranks may use the result differently."""
    return _AllGather.apply(x, group, dim) if group.size() > 1 else x


def reduce_scatter(x: torch.Tensor, group, dim: int = 0) -> torch.Tensor:
    """This rank's equal slice along `dim` of the sum of all ranks' `x`."""
    return _ReduceScatter.apply(x, group, dim) if group.size() > 1 else x


def _sum(x, group):
    # a copy, since x is the caller's and must not change under it
    return ops.all_reduce(x.clone(memory_format=torch.contiguous_format), group=group)


def _join(x, group, dim):
    if dim % x.dim() == 0:
        return ops.all_gather(x, group)
    return ops.all_gather(x.transpose(0, dim), group).transpose(0, dim).contiguous()


def _sum_slice(x, group, dim):
    return ops.reduce_scatter(x.transpose(0, dim), group=group).transpose(0, dim).contiguous()


def _slice(x, group, dim):
    size, p = x.shape[dim], group.size()
    if size % p:
        raise ValueError(f"dim {dim} of {tuple(x.shape)} does not divide over {p} ranks: pad it to a multiple of {p}")
    return x.narrow(dim, group.rank() * (size // p), size // p).contiguous()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _sum(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return _sum(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, dim):
        ctx.group, ctx.dim = group, dim
        return _slice(x, group, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _join(grad, ctx.group, ctx.dim), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, dim):
        ctx.group, ctx.dim = group, dim
        return _join(x, group, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _slice(grad, ctx.group, ctx.dim), None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, dim):
        ctx.group, ctx.dim = group, dim
        return _join(x, group, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _sum_slice(grad, ctx.group, ctx.dim), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, dim):
        ctx.group, ctx.dim = group, dim
        return _sum_slice(x, group, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _join(grad, ctx.group, ctx.dim), None, None
