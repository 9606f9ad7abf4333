"""Whether the gradients of all of a model are of the same tokens, before they are summed or their norm is taken."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from .grads import Mark


def check_tokens(model: nn.Module, marks: Iterable[Mark]) -> None:
    """Raise RuntimeError where nothing sums the gradients of ranks that share a sequence, and where experts have those
    of more or fewer ranks' tokens than the rest of the model. `marks` are all of the model's."""
    _context(model)
    _experts(model, list(marks))


def _context(model: nn.Module) -> None:
    context, reducer = getattr(model, "context", None), getattr(model, "reducer", None)
    if context is not None and (reducer is None or not inside(context.group, (reducer.group,))):
        axis = "there is no data axis" if reducer is None else (
            f"the data axis has ranks {dist.get_process_group_ranks(reducer.group)}")
        raise RuntimeError(f"the sequence is cut over ranks {dist.get_process_group_ranks(context.group)}, each of "
                           f"which has the gradients of its own tokens, and {axis}, which has to sum them: give the "
                           "model one over these ranks too, data.replicate(model, dp_cp) or zero.shard")


def _experts(model: nn.Module, marks: list[Mark]) -> None:
    reducer = getattr(model, "reducer", None)
    data = 1 if reducer is None else reducer.group.size()
    tensor = max((math.prod(group.size() for group in each.cut) for each in marks if not each.spread), default=1)
    for each in marks:
        copies = 1 if each.partial is None else each.partial.size()
        if each.spread and (over := copies * math.prod(group.size() for group in each.cut)) != data * tensor:
            raise RuntimeError(f"experts lie on {over} ranks, {copies} of them with the same ones, and the rest of the "
                               f"model on {data * tensor}, {data} of them replicas: data.replicate or zero.shard the "
                               "model over all ranks with tokens of their own, and give expert.cut as `replicas` the "
                               "group of those that have the same experts")


def inside(some: dist.ProcessGroup, groups: tuple[dist.ProcessGroup, ...]) -> bool:
    """Whether one of the groups has all these ranks, so that what is summed over it has been over them."""
    ranks = set(dist.get_process_group_ranks(some))
    return any(ranks <= set(dist.get_process_group_ranks(group)) for group in groups)
