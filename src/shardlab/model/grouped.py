"""Grouped matrix products: many weights, each for some of the rows, in one step of autograd.

One product after another, each into its place in the result: nothing is put together afterwards, and what comes between
two of them, an activation, is computed for all rows at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.function import once_differentiable


def linear(rows: torch.Tensor, counts: Sequence[int], *layers: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """For each of the `layers`, which share their input, rows (sum of counts, in) → (sum of counts, out).

    A layer is a weight (out, in) for each group of rows: the first is that of the first counts[0] rows, and so on. A
    weight without rows gets a gradient of zeros.
    """
    return _Grouped.apply(rows, counts, len(layers), *(weight for layer in layers for weight in layer))


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, counts, layers, *weights):
        ctx.save_for_backward(rows, *weights)
        ctx.counts, ctx.layers = list(counts), layers
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
        of_weights = []
        for wanted, parts in zip(_split(ctx.needs_input_grad[3:], ctx.layers), grads, strict=True):
            of_weights += [part.t() @ own if each else None
                           for each, part, own in zip(wanted, parts, rows.split(ctx.counts), strict=True)]
        return of_rows, None, None, *of_weights


def _split(flat: Sequence, layers: int) -> list[Sequence]:
    """One layer's after another's, as a list for each."""
    size = len(flat) // layers
    return [flat[i * size : (i + 1) * size] for i in range(layers)]
