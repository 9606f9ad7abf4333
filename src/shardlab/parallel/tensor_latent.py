"""Tensor parallelism of latent attention: the way down to the latents whole on every rank, the way up cut by heads.

A latent is short and serves all heads, so every rank computes it alike, and the region is entered there: what a rank's
heads give the latents back is a part of a sum, and the all-reduces of backward are of the latents' gradients, not of
the stream's. The cache holds as much on every rank as on one.

With sequence parallelism each rank computes the latents of its own tokens, and they are gathered in the stream's place:
fewer bytes, by DeepSeek-V3's sizes 1,536 + 512 + 64 numbers a token for 7,168. Queries that have no latent need the
stream all the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from ..comm.regions import all_gather, copy_to, gather_from
from ..model.latent import LatentAttention
from ..specs import ModelSpec
from . import grads
from .linear import ColumnParallelLinear, RowParallelLinear
from .rng import ParallelDropout
from .sequence import Mode, enter, unpad
from .shard import window


class ParallelLatentAttention(LatentAttention):
    """Latent attention over this rank's heads: q_b_proj (or q_proj) and kv_b_proj cut by columns, o_proj by rows."""

    def __init__(self, plain: LatentAttention, spec: ModelSpec, group: dist.ProcessGroup, mode: Mode):
        with torch.device("meta"):
            super().__init__(spec)
        self.group, self.mode = group, mode
        if self.latent.q_rank is None:
            self.q_proj = _columns(plain.q_proj, group)
        else:
            self.q_a_proj, self.q_a_layernorm = plain.q_a_proj, plain.q_a_layernorm
            self.q_b_proj = _columns(plain.q_b_proj, group)
        self.kv_a_proj_with_mqa, self.kv_a_layernorm = plain.kv_a_proj_with_mqa, plain.kv_a_layernorm
        self.kv_b_proj = _columns(plain.kv_b_proj, group)
        self.o_proj = RowParallelLinear(plain.o_proj, group, mode)
        self.dropout = ParallelDropout(plain.dropout, group, sharded=True)
        if mode:  # each rank projects its own tokens down
            queries = () if self.latent.q_rank is None else (self.q_a_proj, self.q_a_layernorm)
            for module in (*queries, self.kv_a_proj_with_mqa, self.kv_a_layernorm):
                for name in ("weight", "bias"):
                    grads.mark(module, name, partial=group)

    def project(self, x: torch.Tensor, tokens: int) -> Sequence[torch.Tensor]:
        if self.latent.q_rank is None:
            q = self._entered(x, self.q_proj, tokens)
        else:
            q = self._entered(self.q_a_layernorm(self.q_a_proj(x)), self.q_b_proj, tokens)
        latent, key = self.compressed(x)
        key = unpad(all_gather(key, self.group), tokens) if self.mode else copy_to(key, self.group)
        return q, latent, key

    def up(self, latent: torch.Tensor, tokens: int) -> torch.Tensor:
        return self._entered(latent, self.kv_b_proj, tokens)

    def whole(self, latent: torch.Tensor, tokens: int) -> torch.Tensor:
        return unpad(gather_from(latent, self.group, 0), tokens) if self.mode else latent

    def _entered(self, x: torch.Tensor, layer: nn.Linear, tokens: int) -> torch.Tensor:
        """What the column-parallel layer puts out for all tokens, from x as it is between cut layers."""
        (y,) = enter(x, [layer], self.group, self.mode)
        return unpad(y, tokens) if self.mode else y


def _columns(whole: nn.Linear, group: dist.ProcessGroup) -> ColumnParallelLinear:
    """This rank's heads of a layer that puts out equally much for each, and the ranks have equally many."""
    n, p = whole.out_features, group.size()
    layer = ColumnParallelLinear(whole, window(n, p, group.rank(), dim=0), n // p)
    grads.mark(layer, cut=group)
    return layer
