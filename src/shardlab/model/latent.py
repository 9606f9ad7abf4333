"""Multi-head latent attention, MLA: keys and values of all heads from one short vector a token (DeepSeek-V2,
arXiv:2405.04434, §2.1).

The stream is projected down to that latent, and for each head up again. A second, short key is made beside it, which
all heads share: RoPE turns it, and could not turn what is still to be projected. These two are what the cache holds, so
that a new token has to be projected up together with all before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import call

import torch
from torch import nn

from ..specs import ModelSpec
from .attention import Attend, attend
from .cache import LayerCache
from .dropout import Dropout
from .recompute import Run
from .rope import rotate

NORM_EPS = 1e-6  # of the latents' norms in transformers 5.24, whatever the other norms have


class LatentAttention(nn.Module):
    """Each head attends to the tokens up to its own, with keys and values of its own from the latents of them.

    Nothing in `forward` counts heads: it takes as many as the projections put out, so a rank may hold some.
    """

    def __init__(self, spec: ModelSpec, dropout: float = 0.0):
        super().__init__()
        assert spec.latent is not None
        self.latent = latent = spec.latent
        h, heads, query, bias = spec.hidden, spec.heads, latent.nope_dim + latent.rope_dim, spec.attention_bias
        if latent.q_rank is None:
            self.q_proj = nn.Linear(h, heads * query, bias=False)
        else:
            self.q_a_proj = nn.Linear(h, latent.q_rank, bias=bias)
            self.q_a_layernorm = nn.RMSNorm(latent.q_rank, eps=NORM_EPS)
            self.q_b_proj = nn.Linear(latent.q_rank, heads * query, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(h, latent.cached, bias=bias)
        self.kv_a_layernorm = nn.RMSNorm(latent.kv_rank, eps=NORM_EPS)
        self.kv_b_proj = nn.Linear(latent.kv_rank, heads * (latent.nope_dim + latent.value_dim), bias=False)
        self.o_proj = nn.Linear(heads * latent.value_dim, h, bias=spec.output_bias)
        self.dropout = Dropout(dropout)
        self.scale = softmax_scale(spec)
        self.attend: Attend = attend

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: LayerCache | None = None,
        run: Run = call, seed: int | None = None,
    ) -> torch.Tensor:
        """x (batch, seq, hidden), with cos and sin (batch, 1, seq, rope_dim) → (batch, seq, hidden).

        `run(core, *args)` calls the part that has no weights. `seed` is that of the heads' dropout; None drops nothing.
        """
        batch, _, seq, _ = cos.shape
        nope, rope, value = self.latent.nope_dim, self.latent.rope_dim, self.latent.value_dim
        q, latent, key = self.project(x, batch * seq)
        key = self.turn(key.view(batch, 1, seq, rope), cos, sin)
        heads = q.shape[-1] // (nope + rope)
        q = q.view(batch, seq, heads, nope + rope).transpose(1, 2)  # (batch, heads, seq, …)
        if cache is None:
            kv = self.up(latent, batch * seq).view(batch, seq, heads, nope + value).transpose(1, 2)
            y = run(self.core, q, kv, key, cos, sin)
        else:
            latent = self.whole(latent, batch * seq).view(batch, 1, seq, self.latent.kv_rank)
            y = cache.attend(self.turned(q, cos, sin), latent, key, self.from_latents)
        return self.o_proj(self.dropout(y.transpose(1, 2).flatten(2), seed))

    def from_latents(self, q: torch.Tensor, latent: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None = None
                     ) -> torch.Tensor:
        """Attention over cached latents (batch, 1, tokens, kv_rank) and shared keys (…, rope_dim), of q (batch, heads,
        new, nope_dim + rope_dim), turned: (batch, heads, new, value_dim)."""
        kv = self.kv_b_proj(latent[:, 0]).unflatten(-1, (-1, self.latent.nope_dim + self.latent.value_dim))
        return self.over(q, kv.transpose(1, 2), key, mask)

    def project(self, x: torch.Tensor, tokens: int) -> Sequence[torch.Tensor]:
        """Of x, which has `tokens` tokens: queries (batch, seq, heads × (nope_dim + rope_dim)), the latent to be given
        to `up`, (batch, seq, kv_rank), and the shared key, not turned yet, (batch, seq, rope_dim)."""
        return self.queries(x), *self.compressed(x)

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seq, hidden) → (batch, seq, heads × (nope_dim + rope_dim))."""
        if self.latent.q_rank is None:
            return self.q_proj(x)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))

    def compressed(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(…, hidden) → the latent of keys and values, normed, (…, kv_rank), and the shared key (…, rope_dim)."""
        latent, key = self.kv_a_proj_with_mqa(x).split([self.latent.kv_rank, self.latent.rope_dim], -1)
        return self.kv_a_layernorm(latent), key

    def up(self, latent: torch.Tensor, tokens: int) -> torch.Tensor:
        """The latent of all `tokens` tokens → keys without position, and values: (batch, seq, heads × (nope_dim +
        value_dim))."""
        return self.kv_b_proj(latent)

    def whole(self, latent: torch.Tensor, tokens: int) -> torch.Tensor:
        """The latent of all `tokens` tokens, for the cache: (batch, seq, kv_rank)."""
        return latent

    def turn(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x (batch, heads, seq, rope_dim), turned by its positions. Pairs that are neighbours come out half of rope_dim
        apart, of queries and keys alike, whose products stay what they are."""
        if self.latent.interleaved:
            x = x.unflatten(-1, (self.latent.rope_dim // 2, 2)).transpose(-1, -2).flatten(-2)
        return rotate(x, cos, sin)

    def core(self, q: torch.Tensor, kv: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
             ) -> torch.Tensor:
        """The part of attention that has no weights: q (batch, heads, seq, nope_dim + rope_dim), kv (batch, heads,
        tokens, nope_dim + value_dim), key (batch, 1, tokens, rope_dim), turned → (batch, heads, seq, value_dim)."""
        return self.over(self.turned(q, cos, sin), kv, key)

    def turned(self, q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Queries (batch, heads, seq, nope_dim + rope_dim), their last part turned by its positions."""
        own, turned = q.split([self.latent.nope_dim, self.latent.rope_dim], -1)
        return torch.cat((own, self.turn(turned, cos, sin)), -1)

    def over(self, q: torch.Tensor, kv: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None = None
             ) -> torch.Tensor:
        """As `core`, of queries that are turned."""
        own, v = kv.split([self.latent.nope_dim, self.latent.value_dim], -1)
        k = torch.cat((own, key.expand(-1, kv.shape[1], -1, -1)), -1)
        return self.attend(q, k, v, self.scale) if mask is None else self.attend(q, k, v, self.scale, mask)


def softmax_scale(spec: ModelSpec) -> float:
    """What queries times keys are multiplied by: 1/√(nope_dim + rope_dim), and where YaRN's `mscale_all_dim` is given,
    its factor twice, for queries and for keys; `rope` leaves it out of cos and sin then (DeepSeek-V3's
    inference/model.py, and transformers 5.24)."""
    assert spec.latent is not None
    scale, scaling = (spec.latent.nope_dim + spec.latent.rope_dim) ** -0.5, spec.rope_scaling
    if scaling is not None and scaling.mscale_all_dim:
        scale *= (0.1 * scaling.mscale_all_dim * math.log(max(scaling.factor, 1.0)) + 1.0) ** 2
    return scale
