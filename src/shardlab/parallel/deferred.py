"""The gradients of weights, put off: backward computes those of the inputs now, and those of the weights when asked.

Y = X Wᵀ has two gradients, dX = dY W and dW = dYᵀ X. The stage before waits for dX; for dW nobody waits until the
optimizer's step. Zero-bubble schedules compute it where a rank would stand idle (Qi et al., arXiv:2401.10241, §2.1).
What is put off keeps X and dY of each layer until then. All matrices of linear layers and of experts are; norms, biases
and the embedding, whose gradients take next to no time, are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from ..model import grouped


class Deferred:
    """The weight gradients that one backward pass has put off: (weight, dY (tokens, out), X (tokens, in)) of each."""

    def __init__(self):
        # an input of every layer, so that backward comes to those whose other inputs need no gradient
        self.called = torch.zeros((), requires_grad=True)
        self._parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def add(self, weight: torch.Tensor, given: torch.Tensor, x: torch.Tensor) -> None:
        """Put off dYᵀ X."""
        self._parts.append((weight, given.detach(), x.detach()))  # of which nothing else is to be computed

    def compute(self) -> None:
        """Add the gradients to the weights'. Autograd does it, so that hooks on the weights see them come."""
        parts, self._parts = self._parts, []
        if parts:
            torch.autograd.backward([_Gradient.apply(*part) for part in parts])


_plain, _plain_grouped = F.linear, grouped.linear
_open: list[Deferred] = []  # the innermost `deferring` last; of the process, which is the rank


def now() -> Deferred | None:
    """What to put weight gradients off to, of the innermost `deferring` around the call; None outside of any."""
    return _open[-1] if _open else None


@contextmanager
def deferring(later: Deferred) -> Iterator[None]:
    """Put off to `later` the weight gradients of all linear layers that run forward in the block.

    A backward pass that computes layers again belongs in such a block too. What is replaced in it is F.linear, which
    all of them call, and what experts call in its place: a mode of PyTorch's (`torch.overrides`) is off inside of
    backward, which runs as one call.
    """
    _open.append(later)
    F.linear, grouped.linear = _linear, _grouped  # type: ignore[assignment]
    try:
        yield
    finally:
        _open.pop()
        F.linear, grouped.linear = (_linear, _grouped) if _open else (_plain, _plain_grouped)  # type: ignore


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if not (torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf):
        return _plain(input, weight, bias)
    # detached, or autograd would call hooks on the weight for a gradient that is not there yet
    return _Linear.apply(input, weight.detach(), bias, _open[-1].called, [weight], _open[-1])


def _grouped(rows: torch.Tensor, counts: Sequence[int], *layers: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    weights, later = [weight for layer in layers for weight in layer], _open[-1]
    trained = {i for i, weight in enumerate(weights) if weight.requires_grad}
    if not (torch.is_grad_enabled() and trained and all(weights[i].is_leaf for i in trained)):
        return _plain_grouped(rows, counts, *layers)

    def take(i: int, given: torch.Tensor, x: torch.Tensor) -> None:
        if i in trained:
            later.add(weights[i], given, x)

    detached = [[weight.detach() for weight in layer] for layer in layers]
    return grouped.products(rows, counts, detached, take, later.called)


class _Linear(torch.autograd.Function):
    """F.linear, whose backward puts the weight's gradient off."""

    @staticmethod
    def forward(ctx, x, weight, bias, called, itself, later):
        ctx.save_for_backward(x, weight)
        (ctx.weight,), ctx.later = itself, later
        return _plain(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, given):
        x, weight = ctx.saved_tensors
        rows = given.flatten(0, -2)
        ctx.later.add(ctx.weight, rows, x.flatten(0, -2))
        of_x = given @ weight if ctx.needs_input_grad[0] else None
        of_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return of_x, None, of_bias, None, None, None


class _Gradient(torch.autograd.Function):
    """A number that stands for nothing, with dYᵀ X as its gradient in the weight."""

    @staticmethod
    def forward(ctx, weight, given, x):
        ctx.save_for_backward(given, x)
        return given.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx, _):
        given, x = ctx.saved_tensors
        return given.t() @ x, None, None
