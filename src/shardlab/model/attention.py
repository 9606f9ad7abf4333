"""Causal self-attention with grouped queries (GQA, arXiv:2305.13245)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import call

import torch
import torch.nn.functional as F
from torch import nn

from ..specs import ModelSpec
from .cache import LayerCache
from .dropout import Dropout
from .recompute import Run
from .rope import rotate

Attend = Callable[..., torch.Tensor]  # see `attend`


class Attention(nn.Module):
    """Each query head attends to the tokens up to its own; heads / kv_heads neighbouring heads share keys and values.

    Nothing in `forward` counts heads: it takes as many as q_proj, k_proj and v_proj put out, so a rank may hold some.
    """

    def __init__(self, spec: ModelSpec, dropout: float = 0.0):
        super().__init__()
        self.head_dim = d = spec.head_dim
        bias = spec.attention_bias
        self.q_proj = nn.Linear(spec.hidden, spec.heads * d, bias=bias)
        self.k_proj = nn.Linear(spec.hidden, spec.kv_heads * d, bias=bias)
        self.v_proj = nn.Linear(spec.hidden, spec.kv_heads * d, bias=bias)
        self.o_proj = nn.Linear(spec.heads * d, spec.hidden, bias=spec.output_bias)
        self.q_norm = nn.RMSNorm(d, eps=spec.norm_eps) if spec.qk_norm else None
        self.k_norm = nn.RMSNorm(d, eps=spec.norm_eps) if spec.qk_norm else None
        self.dropout = Dropout(dropout)
        self.attend: Attend = attend

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: LayerCache | None = None,
        run: Run = call, seed: int | None = None,
    ) -> torch.Tensor:
        """x (batch, seq, hidden), with cos and sin (batch, 1, seq, head_dim) → (batch, seq, hidden).

        `run(core, *args)` calls the part that has no weights. `seed` is that of the heads' dropout; None drops nothing.
        """
        batch, _, seq, _ = cos.shape
        q, k, v = (y.view(batch, seq, y.shape[-1] // self.head_dim, self.head_dim)
                   for y in self.project(x, batch * seq))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))  # (batch, heads, seq, head_dim)
        y = run(core, q, k, v, cos, sin, cache, self.attend)
        return self.o_proj(self.dropout(y.transpose(1, 2).flatten(2), seed))

    def project(self, x: torch.Tensor, tokens: int) -> Sequence[torch.Tensor]:
        """Queries, keys and values of x, which has `tokens` tokens: each (batch, seq, heads × head_dim)."""
        return [proj(x) for proj in (self.q_proj, self.k_proj, self.v_proj)]


def core(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: LayerCache | None,
    attend: Attend,
) -> torch.Tensor:
    """The part of attention that has no weights: (batch, heads, seq, head_dim), of KV heads for k and v, → as q."""
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    return attend(q, k, v) if cache is None else cache.attend(q, k, v, attend)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None,
           mask: torch.Tensor | None = None) -> torch.Tensor:
    """Softmax(scale · q kᵀ) v, the queries being the last tokens of the keys: causal. By default scale is 1/√head_dim.

    q (batch, heads, new, head_dim), k and v (batch, kv_heads, tokens, head_dim) → (batch, heads, new, v's head_dim).
    `mask` (batch, 1, new, tokens), bools, says instead which keys a query sees, where sequences differ in length.
    """
    if q.shape[-1] != v.shape[-1] and q.device.type == "cpu":
        # where they differ, PyTorch's kernel for the CPU would keep all scores: zeros cost less
        width, d = max(q.shape[-1], v.shape[-1]), v.shape[-1]
        scale = scale or q.shape[-1] ** -0.5
        q, k, v = (F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
        return attend(q, k, v, scale, mask)[..., :d]
    new, tokens = q.shape[2], k.shape[2]
    causal = mask is None and 1 < new == tokens
    if mask is None and 1 < new < tokens:
        mask = torch.ones(new, tokens, dtype=torch.bool, device=q.device).tril(tokens - new)
    # enable_gqa reads each KV head several times where it lies. On one CPU thread, 8 × 256 tokens, 8 heads of 64 over
    # 2 KV heads, forward and backward: 62 ms, against 70 ms with the KV heads repeated in memory (float64: 204, 216).
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale,
                                          enable_gqa=True)
