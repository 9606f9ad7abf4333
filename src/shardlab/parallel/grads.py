"""The one place that finishes gradients after backward.

Most gradients of a cut model are right when backward ends, since the regions summed what flowed through them. A
parameter that several ranks hold whole, but that each used for its own part of the work (the norm of each rank's own
heads, a KV head shared by several ranks), has a part of its gradient on each. A cut marks it; `finish` sums.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from ..comm import ops, phase


def mark_partial(parameter: nn.Parameter, group: dist.ProcessGroup) -> None:
    """Note that `parameter` is the same on all ranks of `group`, and its gradient on each only a part of the sum."""
    if group.size() > 1:
        parameter.partial_over = group  # type: ignore[attr-defined]


def finish(model: nn.Module) -> None:
    """Sum what backward left in parts, in place in `.grad`. Every rank calls it once, after its last backward."""
    with phase("finish"):
        for parameter in model.parameters():
            group = getattr(parameter, "partial_over", None)
            if group is not None and parameter.grad is not None:
                ops.all_reduce(parameter.grad, group=group)
