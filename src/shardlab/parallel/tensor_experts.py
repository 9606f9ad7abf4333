"""Experts under tensor parallelism: each cut over the ranks as a layer is, or whole, with the tokens shared out.

| `etp`  | an expert is             | a rank computes               | travels                                          |
|--------|--------------------------|-------------------------------|--------------------------------------------------|
| tp     | cut: some hidden units   | a part of the sum, all tokens | parts, as behind every row-parallel layer        |
| 1      | whole                    | the whole, for its own tokens | their rows, if the stream is whole on every rank |

Small experts lose by being cut: each rank's products become thin. With `etp` = 1 the ranks of the tensor axis are to
the experts what those of a data axis are, and expert parallelism may go over both.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from ..comm import ops, regions
from ..model.mlp import MLP
from ..model.moe import Experts, MoE
from ..model.router import Routing
from ..specs import padded
from . import grads
from .linear import ColumnParallelLinear
from .sequence import Mode, leave, pad, unpad
from .shard import parameter, window


def cut(plain: MoE, group: dist.ProcessGroup, mode: Mode, etp: int) -> MoE:
    """The block over the group's ranks, with `etp` of them to an expert: all, or 1."""
    return SplitMoE(plain, group, mode) if etp == 1 else CutMoE(plain, group, mode)


class CutMoE(MoE):
    """Each expert cut, the shared ones too. With sequence parallelism, in either mode, the gathered rows are kept."""

    def __init__(self, plain: MoE, group: dist.ProcessGroup, mode: Mode):
        nn.Module.__init__(self)
        self.group, self.mode, self.gate = group, mode, plain.gate
        self.experts = Experts({name: _Slice(expert, group) for name, expert in plain.experts.items()})  # type: ignore
        self.shared_experts = None if plain.shared_experts is None else _Slice(plain.shared_experts, group)
        if mode:  # each rank routes its own tokens
            grads.mark(self.gate, partial=group)

    def forward(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        rows, group = x.flatten(0, -2), self.group
        if self.mode:
            rows, weights = self._gathered(rows, routing)
        else:
            weights, scores = self.gate(rows, routing)
            self.gate.plan(routing, weights)
            self.gate.balance(scores, routing.real, routing)
            # what a rank computes with them is a part of a sum, and so is their gradient
            rows, weights = regions.copy_to(rows, group), regions.copy_to(weights, group)
        return leave(self.mix(rows, weights, routing), group, self.mode).view_as(x)

    def _gathered(self, rows: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's rows (rows, hidden), routed → all ranks' rows and weights, and in `routing` what is chosen."""
        group = self.group
        if routing.experts is None:
            routing.real = pad(routing.real, group)
        mine = slice(group.rank() * len(rows), (group.rank() + 1) * len(rows))
        own = Routing(self.gate, routing.real[mine], None if routing.experts is None else routing.experts[mine])
        weights, scores = self.gate(rows, own)
        if routing.experts is None:
            assert own.experts is not None
            routing.experts = ops.all_gather(own.experts, group)
        weights, rows = regions.all_gather(weights, group), regions.all_gather(rows, group)
        self.gate.plan(routing, weights)
        self.gate.balance(scores, own.real, routing, lambda part: regions.reduce_from(part, group))
        return rows, weights


class SplitMoE(MoE):
    """Experts whole, and each rank's tokens its own: a slice of them where the stream is whole on every rank. An
    expert's capacity is of a rank's tokens."""

    def __init__(self, plain: MoE, group: dist.ProcessGroup, mode: Mode):
        nn.Module.__init__(self)
        self.group, self.mode = group, mode
        self.gate, self.experts, self.shared_experts = plain.gate, plain.experts, plain.shared_experts
        for module in self.modules():
            for name, each in module.named_parameters(recurse=False):
                if each.requires_grad:
                    grads.mark(module, name, partial=group)

    def forward(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        group, rows = self.group, x.flatten(0, -2)
        n = len(rows)
        if not self.mode:
            rows = regions.scatter_to(pad(rows, group), group, 0)
        if routing.handle is None:
            mine = slice(group.rank() * len(rows), (group.rank() + 1) * len(rows))
            routing.handle = Routing(self.gate, pad(routing.real, group)[mine])
        own: Routing = routing.handle
        weights, scores = self.gate(rows, own)
        self.gate.plan(own, weights)
        if routing.load is None:
            assert own.load is not None
            told = ops.all_reduce(torch.cat((own.load, own.load.new_tensor([own.dropped]))), group=group)
            routing.load, routing.dropped = told[:-1], int(told[-1])
        self.gate.balance(scores, own.real, routing, lambda part: regions.reduce_from(part, group))
        y = self.mix(rows, weights, own)
        return (y if self.mode else unpad(regions.gather_from(y, group, 0), n)).view_as(x)


class _Slice(MLP):
    """Some hidden units of a feed-forward block: what it puts out is a part of the sum."""

    def __init__(self, plain: MLP, group: dist.ProcessGroup):
        nn.Module.__init__(self)
        ffn, hidden, p = plain.gate_proj.out_features, plain.gate_proj.in_features, group.size()
        units, size = window(ffn, p, group.rank(), dim=0), padded(ffn, p) // p
        self.gate_proj = ColumnParallelLinear(plain.gate_proj, units, size)
        self.up_proj = ColumnParallelLinear(plain.up_proj, units, size)
        self.down_proj = nn.Linear(size, hidden, bias=False, device="meta")
        self.down_proj.weight = parameter(plain.down_proj.weight, window(ffn, p, group.rank(), dim=1), size)
        for proj in (self.gate_proj, self.up_proj, self.down_proj):
            grads.mark(proj, cut=group)
