"""Cross-entropy over a cut vocabulary: the logits never leave their rank, three numbers a token do.

The maximum (so that no exponential overflows), the sum of exponentials, and the target's logit, which one rank has.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from ..comm import ops
from ..model.head import IGNORED
from ..model.parameters import Window


def vocab_parallel_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, rows: Window,
                                 group: dist.ProcessGroup, valid: int | None = None) -> torch.Tensor:
    """The sum over labels other than -100 of −log softmax(logits)[label], ÷ `valid`: a scalar, the same on all ranks.

    `valid` None is the number of those labels; see `model.head.cross_entropy`.
    logits (…, c): this rank's columns `rows` of the vocabulary, those past `stop - start` being padding. labels (…).
    Computed in float32, or float64 for float64 logits. The caller's tensors are not written to.
    """
    counts = labels != IGNORED
    losses = _CrossEntropy.apply(logits, labels.where(counts, 0), rows, group)
    return losses.where(counts, 0).sum() / (counts.sum() if valid is None else valid)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, rows, group):
        held = rows.stop - rows.start
        z = logits.to(torch.promote_types(logits.dtype, torch.float32))
        z = F.pad(z[..., :held], (0, z.shape[-1] - held), value=-torch.inf)
        top = ops.all_reduce(z.amax(-1), "max", group)
        exps = (z - top.unsqueeze(-1)).exp_()
        mine = (labels >= rows.start) & (labels < rows.stop)
        index = (labels - rows.start).where(mine, 0).unsqueeze(-1)
        target = z.gather(-1, index).squeeze(-1).where(mine, 0)
        sums = torch.stack([exps.sum(-1), target])
        total, target = ops.all_reduce(sums, group=group)
        ctx.save_for_backward(exps.div_(total.unsqueeze(-1)), index, mine)
        ctx.dtype = logits.dtype
        return total.log() + top - target

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        softmax, index, mine = ctx.saved_tensors
        out = softmax.clone().scatter_add_(-1, index, -mine.unsqueeze(-1).to(softmax.dtype))
        return out.mul_(grad.unsqueeze(-1)).to(ctx.dtype), None, None, None


def valid_tokens(labels: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None) -> int:
    """How many of the `labels`, of all micro-batches of a step, are not -100; over all ranks of the data axis `group`.

    Count them before the first forward pass and give the number to each loss as `valid`: then losses and gradients of
    all ranks and micro-batches add up to those of the whole batch.
    """
    count = torch.tensor(sum(int((each != IGNORED).sum()) for each in labels))
    return int(count if group is None else ops.all_reduce(count, group=group))
