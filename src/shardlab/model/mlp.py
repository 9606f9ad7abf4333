"""The feed-forward block: SwiGLU (arXiv:2002.05202)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn


class MLP(nn.Module):
    """down(silu(gate(x)) · up(x)), with `ffn` hidden units."""

    def __init__(self, hidden: int, ffn: int, bias: bool = False):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, ffn, bias=bias)
        self.up_proj = nn.Linear(hidden, ffn, bias=bias)
        self.down_proj = nn.Linear(ffn, hidden, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, hidden) → (…, hidden)."""
        gate, up = self.project(x)
        gate = F.silu(gate)
        gate = gate * up
        del up  # in inference nothing is held that is not needed again
        return self.down_proj(gate)

    def project(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """gate(x) and up(x), each (…, ffn)."""
        return self.gate_proj(x), self.up_proj(x)
