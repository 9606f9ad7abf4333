"""A mixture of experts (Shazeer et al., arXiv:1701.06538): many feed-forward blocks, of which each token goes to a few.

Every token is held once for each of its experts, sorted by expert, so that each expert has its tokens in one piece: one
matrix product an expert, whatever its number of tokens, and none dropped (dropless; MegaBlocks, arXiv:2211.15841).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from ..specs import ModelSpec
from . import grouped
from .mlp import MLP
from .router import Router, Routing, Rules


class Experts(nn.ModuleDict):
    """Feed-forward blocks by their numbers: all of a layer's, or those that a rank holds."""

    def forward(self, rows: torch.Tensor, routing: Routing) -> torch.Tensor:
        """rows (choices, hidden), sorted by expert as `routing` says → what each row's expert makes of it."""
        return self.apart(rows, routing.counts)

    def apart(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """rows (sum of counts, hidden), the first counts[0] the first block's … → (sum of counts, hidden).

        A block without rows runs too: its weights get gradients of zero, not none, and an optimizer that lets weights
        decay treats them as it does the others.
        """
        blocks = [cast(MLP, block) for block in self.values()]
        gate, up = grouped.linear(rows, counts, [block.gate_proj.weight for block in blocks],
                                  [block.up_proj.weight for block in blocks])
        return grouped.linear(F.silu(gate) * up, counts, [block.down_proj.weight for block in blocks])[0]


class MoE(nn.Module):
    """The feed-forward block of experts: Σ over a token's experts of weight · expert(x), plus the shared of x."""

    def __init__(self, spec: ModelSpec, rules: Rules):
        super().__init__()
        assert spec.experts is not None
        experts, hidden = spec.experts, spec.hidden
        self.gate = Router(hidden, experts, rules)
        self.experts = Experts({str(i): MLP(hidden, experts.ffn) for i in range(experts.routed)})
        self.shared_experts = MLP(hidden, experts.shared * experts.ffn) if experts.shared else None

    def forward(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """(batch, seq, hidden) → (batch, seq, hidden). What is dropped at a full expert, and padding, gets nothing of
        the routed experts: the stream that this is added to passes it by."""
        rows = x.flatten(0, -2)
        weights, scores = self.gate(rows, routing)
        self.gate.plan(routing, weights)
        self.gate.balance(scores, routing.real, routing)
        return self.mix(rows, weights, routing).view_as(x)

    def mix(self, rows: torch.Tensor, weights: torch.Tensor, routing: Routing) -> torch.Tensor:
        """rows (tokens, hidden), weights (tokens, active) → (tokens, hidden): what the experts put out."""
        y = self.routed(rows, weights, routing)
        return y if self.shared_experts is None else y + self.shared_experts(rows)

    def routed(self, rows: torch.Tensor, weights: torch.Tensor,
               routing: Routing) -> torch.Tensor:
        """The same without the shared experts."""
        assert routing.slots is not None
        token = routing.slots // weights.shape[1]
        y = self.experts(rows[token], routing)
        y = y * weights.flatten()[routing.slots].unsqueeze(-1)
        return torch.zeros_like(rows).index_add(0, token, y)
