"""How even the loads of experts are, and the bias that evens them without a loss of its own.

A number of each expert's is added to its scores to choose by, not to weigh by. After a step it goes up by a little for
an expert that got fewer tokens than the mean, and down for one that got more: no gradient speaks of it, and none is
disturbed by it (Wang et al., arXiv:2408.15664, §3; DeepSeek-V3, arXiv:2412.19437, §2.1.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

from ..comm import ops, phase
from ..model.moe import MoE
from ..model.router import Router, Routing
from ..model.transformer import Transformer
from ..specs.check import number


@torch.no_grad()
def loads(model: Transformer, routed: Iterable[Routing], group: dist.ProcessGroup | None = None
          ) -> tuple[torch.Tensor, int]:
    """How many tokens have chosen each expert: (layers with experts, experts), int64; and how many choices found their
    expert full and were dropped. Of the whole model, the same on every rank.

    `routed` are the passes of a step, as `model.loss(…, routed=)` and `execute.run` have given them; `group` is the
    data axis, whose ranks have tokens of their own. Every rank of it and of the model's pipeline calls this, those
    without a pass too. Raises ValueError on a model without experts, and on passes of another one.
    """
    experts, rows = model.spec.experts, dict(_gates(model))
    if experts is None:
        raise ValueError(f"{model.spec.name} has no experts: there are no loads")
    device = next((each.weight.device for each in rows), None)
    told = torch.zeros(model.spec.layers - experts.first_dense, experts.routed + 1, dtype=torch.int64, device=device)
    for each in routed:
        if each.gate not in rows:
            raise ValueError("these are passes of another model: give those of this one")
        if each.load is not None:
            told[rows[each.gate], :-1] += each.load
            told[rows[each.gate], -1] += each.dropped
    pipeline = getattr(model, "pipeline", None)
    with phase("balance"):
        for axis in (group, pipeline and pipeline.group):
            if axis is not None:
                ops.all_reduce(told, group=axis)
    return told[:, :-1], int(told[:, -1].sum())


@torch.no_grad()
def even(model: Transformer, routed: Iterable[Routing], rate: float,
         group: dist.ProcessGroup | None = None) -> tuple[torch.Tensor, int]:
    """Move each expert's bias by `rate`, up where its load is below the layer's mean and
    down where it is above; returns the `loads`. Called after the optimizer's step, before
    the next forward pass, by the same ranks.

    Rates are about 0.001. Raises ValueError as `loads` does, on a model without that
    bias, and on a rate not above 0.
    """
    check(model, rate)
    load, dropped = loads(model, routed, group)
    for gate, row in _gates(model):
        bias = gate.e_score_correction_bias
        assert bias is not None
        bias.add_((load[row].double().mean() - load[row]).sign(), alpha=rate)
    return load, dropped


def check(model: Transformer, rate: float) -> None:
    """Raise ValueError where `even` can't."""
    number("rate", rate)
    if model.spec.experts is None or not model.spec.experts.routing_bias:
        raise ValueError(f"{model.spec.name} has no routing bias to move: see its spec's `experts.routing_bias`; or "
                         "balance its loads by a loss, Rules(balance=)")


def _gates(model: Transformer) -> Iterator[tuple[Router, int]]:
    """The routers here, and which of the whole model's each is, from 0."""
    for name, layer in model.layers.named_children():
        if isinstance(layer.mlp, MoE):
            assert model.spec.experts is not None
            yield layer.mlp.gate, int(name) - model.spec.experts.first_dense
