"""Grouped matrix products: many weights, each for some of the rows, in one step of autograd.

One product after another, each into its place in the result: nothing is put together afterwards, and what comes between
two of them, an activation, is computed for all rows at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.autograd.function import once_differentiable

Take = Callable[[int, torch.Tensor, torch.Tensor], None]


def linear(rows: torch.Tensor, counts: Sequence[int], *layers: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """For each of the `layers`, which share their input, rows (sum of counts, in) → (sum of counts, out).

    A layer is a weight (out, in) for each group of rows: the first is that of the first counts[0] rows, and so on. A
    weight without rows gets a gradient of zeros.
    """
    return products(rows, counts, layers)


def products(rows: torch.Tensor, counts: Sequence[int], layers: Sequence[Sequence[torch.Tensor]],
             take: Take | None = None, always: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """`linear`, whose backward, with `take`, leaves the weights' gradients to it: take(i, dY, X) for each weight, as
    they come in `layers`, of which the gradient is dYᵀ X. Backward comes by if `always`, or rows, need gradients."""
    return _Grouped.apply(rows, counts, len(layers), take, always, *(weight for layer in layers for weight in layer))


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, counts, layers, take, always, *weights):
        ctx.save_for_backward(rows, *weights)
        ctx.counts, ctx.layers, ctx.take = list(counts), layers, take
        parts, out = rows.split(ctx.counts), []
        for layer in _split(weights, layers):
            out.append(rows.new_empty(len(rows), layer[0].shape[0]))
            for part, weight, place in zip(parts, layer, out[-1].split(ctx.counts), strict=True):
                torch.mm(part, weight.t(), out=place)
        return tuple(out)

    @staticmethod
    @once_differentiable
    def backward(ctx, *given):
        rows, *weights = ctx.saved_tensors
        grads = [each.split(ctx.counts) for each in given]
        of_rows = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        if of_rows is not None:
            for i, (layer, parts) in enumerate(zip(_split(weights, ctx.layers), grads, strict=True)):
                for weight, part, place in zip(layer, parts, of_rows.split(ctx.counts), strict=True):
                    if i:
                        place.addmm_(part, weight)
                    else:
                        torch.mm(part, weight, out=place)
        pairs = [pair for parts in grads for pair in zip(parts, rows.split(ctx.counts), strict=True)]
        for i, pair in enumerate(pairs if ctx.take else ()):
            ctx.take(i, *pair)
        of_weights = [given.t() @ x if wanted else None
                      for wanted, (given, x) in zip(ctx.needs_input_grad[5:], pairs, strict=True)]
        return of_rows, None, None, None, None, *of_weights


def _split(flat: Sequence, layers: int) -> list[Sequence]:
    """One layer's after another's, as a list for each."""
    size = len(flat) // layers
    return [flat[i * size : (i + 1) * size] for i in range(layers)]
