"""Sequence parallelism: between cut layers each rank has a slice of the tokens (arXiv:2205.05198, §4.2.2).

Where tensor parallelism holds the stream whole on every rank, and norms, dropout and sums are done p times alike, here
each rank does them for its own tokens. The tokens of all sequences lie one behind the other, (batch · seq, hidden), and
rank r has the r-th p-th of the rows: they need no transposing to be sent. Rows are padded to a multiple of p with
tokens that nothing reads.

The all-reduce at the end of a pair of layers becomes a reduce-scatter, and an all-gather before the next pair. A ring's
all-reduce is these two, so forward sends the same bytes. Backward needs what the column-parallel layers took in, whole:

| mode    | kept for backward | sent in backward                       |
|---------|-------------------|----------------------------------------|
| "keep"  | the whole input   | as much as forward                     |
| "again" | the slice         | the slices are gathered a second time  |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from ..comm import ops
from ..comm.regions import all_gather, copy_to, reduce_from, reduce_scatter
from ..specs import padded

Mode = Literal[False, "keep", "again"]


def check_mode(mode: object) -> None:
    """Raise ValueError unless `mode` is False, "keep" or "again"."""
    if mode is not False and mode not in ("keep", "again"):
        raise ValueError(f"sequence_parallel must be False, 'keep' or 'again', not {mode!r}: 'keep' keeps the gathered "
                         "input of a layer for backward, 'again' gathers it again there")


def enter(x: torch.Tensor, layers: Sequence[nn.Linear], group: dist.ProcessGroup, mode: Mode) -> list[torch.Tensor]:
    """What the column-parallel `layers`, which share their input, put out for all tokens.

    x is the stream between cut layers: whole, (…, hidden), or with sequence parallelism this rank's rows of it,
    (rows, hidden); then the outputs are (p · rows, …), padding and all.
    """
    if mode == "again":
        parameters = [parameter for layer in layers for parameter in (layer.weight, layer.bias)]
        return list(_Again.apply(x, group, *parameters))
    x = all_gather(x, group) if mode else copy_to(x, group)
    return [F.linear(x, layer.weight, layer.bias) for layer in layers]


def leave(parts: torch.Tensor, group: dist.ProcessGroup, mode: Mode) -> torch.Tensor:
    """The stream, from each rank's part of the sum (…, hidden): whole, or this rank's rows of it (rows, hidden)."""
    if not mode:
        return reduce_from(parts, group)
    return reduce_scatter(pad(parts.flatten(0, -2), group), group)


def pad(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`rows` (n, …) with rows of zeros behind them, up to a multiple of the group's size."""
    n = len(rows)
    more = padded(n, group.size()) - n
    return torch.cat((rows, rows.new_zeros(more, *rows.shape[1:]))) if more else rows


def unpad(rows: torch.Tensor, n: int) -> torch.Tensor:
    """The first `n` of the rows: what `pad` was given."""
    return rows if len(rows) == n else rows[:n]


class _Again(torch.autograd.Function):
    """all-gather, then linear layers; kept is the slice, which backward gathers again for the weights' gradients."""

    @staticmethod
    def forward(ctx, x, group, *parameters):
        ctx.group = group
        ctx.save_for_backward(x, *parameters[::2])
        whole = ops.all_gather(x, group)
        return tuple(F.linear(whole, *each) for each in zip(parameters[::2], parameters[1::2], strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        x, *weights = ctx.saved_tensors
        _, _, *wanted = ctx.needs_input_grad
        coming = ops.all_gather(x, ctx.group, async_op=True) if any(wanted[::2]) else None
        dx = None
        if ctx.needs_input_grad[0]:
            dx = grads[0] @ weights[0]
            for grad, weight in zip(grads[1:], weights[1:], strict=True):
                dx.addmm_(grad, weight)
            dx = ops.reduce_scatter(dx, group=ctx.group)
        whole = None if coming is None else coming.wait()
        out = []
        for grad, weight, bias in zip(grads, wanted[::2], wanted[1::2], strict=True):
            out += [grad.t() @ whole if weight else None, grad.sum(0) if bias else None]
        return dx, None, *out
