"""Cross-entropy over a cut vocabulary: the logits never leave their rank, three numbers a token do.

The maximum (so that no exponential overflows), the sum of exponentials, and the target's logit, which one rank has.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from ..comm import ops
from ..model.head import IGNORED
from ..model.parameters import Window


def vocab_parallel_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, rows: Window,
                                 group: dist.ProcessGroup) -> torch.Tensor:
    """The mean over labels other than -100 of −log softmax(logits)[label]: a scalar, the same on all ranks.

    logits (…, c): this rank's columns `rows` of the vocabulary, those past `stop - start` being padding. labels (…).
    Computed in float32, or float64 for float64 logits. The caller's tensors are not written to.
    """
    valid = labels != IGNORED
    losses = _CrossEntropy.apply(logits, labels.where(valid, 0), rows, group)
    return losses.where(valid, 0).sum() / valid.sum()


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
