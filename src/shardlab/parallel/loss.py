"""Cross-entropy over a cut vocabulary: the logits never leave their rank, three numbers a token do.

The maximum (so that no exponential overflows), the sum of exponentials, and the target's logit, which one rank has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ..comm import ops
from ..model.head import IGNORED
from ..model.parameters import Window

BLOCK = 64  # tokens: of a vocabulary of 8,192 over two ranks, 1 MiB


def vocab_parallel_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, rows: Window,
                                 group: dist.ProcessGroup, valid: int | None = None) -> torch.Tensor:
    """The sum over labels other than -100 of −log softmax(logits)[label], ÷ `valid`: a scalar, the same on all ranks.

    `valid` None is the number of those labels; see `model.head.cross_entropy`.
    logits (…, c): this rank's columns `rows` of the vocabulary, those past `stop - start` being padding. labels (…).
    Computed in float32, or float64 for float64 logits. The caller's tensors are not written to.
    """
    counts = labels != IGNORED
    losses = _CrossEntropy.apply(logits.flatten(0, -2), labels.where(counts, 0).flatten(), rows, group)
    return losses.where(counts.flatten(), 0).sum() / (counts.sum() if valid is None else valid)


class _CrossEntropy(torch.autograd.Function):
    """The loss of each token, from z (tokens, c), the logits here. They alone are kept: exponentials take less time to
    compute again than memory to keep, and of a few tokens at a time they never leave the processor's cache."""

    @staticmethod
    def forward(ctx, z, labels, rows, group):
        held, precise = rows.stop - rows.start, torch.promote_types(z.dtype, torch.float32)
        top = z[:, :held].amax(-1).to(precise) if held else z.new_full(labels.shape, -torch.inf, dtype=precise)
        ops.all_reduce(top, "max", group)
        mine = (labels >= rows.start) & (labels < rows.stop)
        index = (labels - rows.start).where(mine, 0).unsqueeze(-1)
        target = z.gather(-1, index).squeeze(-1).where(mine, 0).to(precise)
        # the first of no tokens, so that there is something to join where there are none
        total = torch.cat([target[:0], *(exps.sum(-1) for _, exps in _exponentials(z, top, held))])
        total, target = ops.all_reduce(torch.stack([total, target]), group=group)
        ctx.save_for_backward(z, top, total, index, mine)
        ctx.held = held
        return total.log() + top - target

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        z, top, total, index, mine = ctx.saved_tensors
        scale, target = (grad / total).unsqueeze(-1), -grad.where(mine, 0).unsqueeze(-1)
        out = torch.empty_like(z)
        for i, exps in _exponentials(z, top, ctx.held):
            out[i] = exps.mul_(scale[i]).scatter_add_(-1, index[i], target[i])  # (softmax − one-hot) · grad
        return out, None, None, None


def _exponentials(z: torch.Tensor, top: torch.Tensor, held: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """exp(z − top), new memory of a few tokens at a time, and which; 0 in the padding, the columns from `held` on."""
    for start in range(0, len(z), BLOCK):
        i = slice(start, start + BLOCK)
        shifted = z[i] - top[i].unsqueeze(-1)
        shifted[:, held:] = -torch.inf
        yield i, shifted.exp_()


def valid_tokens(labels: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None) -> int:
    """How many of the `labels`, of all micro-batches of a step, are not -100; over all ranks of the data axis `group`.

    Count them before the first forward pass and give the number to each loss as `valid`: then losses and gradients of
    all ranks and micro-batches add up to those of the whole batch.
    """
    count = torch.tensor(sum(int((each != IGNORED).sum()) for each in labels))
    return int(count if group is None else ops.all_reduce(count, group=group))
