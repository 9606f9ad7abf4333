"""The one place that finishes gradients after backward.

Most gradients of a cut model are right when backward ends, since the regions summed what flowed through them. A
parameter that several ranks hold whole, but that each used for its own part of the work (the norm of each rank's own
heads, a KV head shared by several ranks), has a part of its gradient on each. A cut marks it; `finish` sums. The mark
is on the module, since `load_state_dict(assign=True)` replaces parameters.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from ..comm import ops, phase


def mark_partial(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Note that the parameters of `module` are the same on all ranks of `group`, their gradients parts of a sum."""
    module.partial_over = group  # type: ignore[assignment]


def finish(model: nn.Module) -> None:
    """Sum what backward left in parts, in place in `.grad`.

    Every rank calls it once, after its last backward: a second call would sum what is summed already.
    """
    with phase("finish"):
        for module in model.modules():
            group = getattr(module, "partial_over", None)
            for parameter in module.parameters() if group is not None else ():
                if parameter.grad is not None:
                    ops.all_reduce(parameter.grad, group=group)
