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
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from ..comm import ops
from ..comm.regions import reduce_from_, reduce_scatter
from ..specs import padded
from . import deferred

Mode = Literal[False, "keep", "again"]


def check_mode(mode: object) -> None:
    """Raise ValueError unless `mode` is False, "keep" or "again"."""
    if mode is not False and mode not in ("keep", "again"):
        raise ValueError(f"sequence_parallel must be False, 'keep' or 'again', not {mode!r}: 'keep' keeps the gathered "
                         "input of a layer for backward, 'again' gathers it again there")


def enter(x: torch.Tensor, layers: Sequence[nn.Linear], group: dist.ProcessGroup, mode: Mode) -> Sequence[torch.Tensor]:
    """What the column-parallel `layers`, which share their input, put out for all tokens.

    x is the stream between cut layers: whole, (…, hidden), or with sequence parallelism this rank's rows of it,
    (rows, hidden); then the outputs are (p · rows, …), padding and all.
    """
    weights, later = [layer.weight for layer in layers], deferred.now()
    given = weights if later is None else [weight.detach() for weight in weights]  # see `deferred`
    both = [each for weight, layer in zip(given, layers, strict=True) for each in (weight, layer.bias)]
    return _Enter.apply(x, group, mode, weights, later, None if later is None else later.called, *both)


def leave(parts: torch.Tensor, group: dist.ProcessGroup, mode: Mode) -> torch.Tensor:
    """The stream, from each rank's part of the sum (…, hidden): whole, or this rank's rows of it (rows, hidden).

    `parts` is given up: it may be overwritten.
    """
    return reduce_scatter(pad(parts.flatten(0, -2), group), group) if mode else reduce_from_(parts, group)


def pad(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`rows` (n, …) with rows of zeros behind them, up to a multiple of the group's size."""
    n = len(rows)
    more = padded(n, group.size()) - n
    return torch.cat((rows, rows.new_zeros(more, *rows.shape[1:]))) if more else rows


def unpad(rows: torch.Tensor, n: int) -> torch.Tensor:
    """The first `n` of the rows: what `pad` was given."""
    return rows if len(rows) == n else rows[:n]


class _Enter(torch.autograd.Function):
    """`copy_to` or `all_gather`, then linear layers. Backward adds up the gradients that they give their input before
    one collective sums those of all ranks, while the weights' gradients are computed, or put off (see `deferred`)."""

    @staticmethod
    def forward(ctx, x, group, mode, themselves, later, called, *parameters):
        ctx.group, ctx.mode, ctx.shape, ctx.weights, ctx.later = group, mode, x.shape, themselves, later
        weights, biases = parameters[::2], parameters[1::2]
        whole = ops.all_gather(x, group) if mode else x
        ctx.save_for_backward(x if mode == "again" else whole, *weights)
        return tuple(F.linear(whole, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx, *given):
        kept, *weights = ctx.saved_tensors
        wants_input, wants_bias = ctx.needs_input_grad[0], ctx.needs_input_grad[7::2]
        wants_weight = [weight.requires_grad for weight in ctx.weights]
        grads = [grad.flatten(0, -2) for grad in given]
        gather = ctx.mode == "again" and any(wants_weight)
        gathered = ops.all_gather(kept, ctx.group, async_op=True) if gather else None
        summed: Any = None
        if wants_input:
            parts = grads[0] @ weights[0]
            for grad, weight in zip(grads[1:], weights[1:], strict=True):
                parts.addmm_(grad, weight)
            collective = ops.reduce_scatter if ctx.mode else ops.all_reduce
            summed = collective(parts, group=ctx.group, async_op=True)
        whole = kept.flatten(0, -2) if gathered is None else gathered.wait()
        out = []
        for grad, weight, wanted, bias in zip(grads, ctx.weights, wants_weight, wants_bias, strict=True):
            if wanted and ctx.later is not None:
                ctx.later.add(weight, grad, whole)
                wanted = False
            out += [grad.t() @ whole if wanted else None, grad.sum(0) if bias else None]
        return None if summed is None else summed.wait().view(ctx.shape), *[None] * 5, *out
