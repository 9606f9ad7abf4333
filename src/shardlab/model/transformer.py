"""The plain model: a decoder-only Transformer of the Llama family, on one device, knowing nothing of ranks.

Modules have the names of Hugging Face's, without the leading "model.", so a checkpoint's tensors need no table.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat

import torch
from torch import nn

from ..specs import ModelSpec
from . import rope
from .attention import Attention
from .cache import KVCache, LayerCache
from .dropout import Dropout
from .generate import greedy
from .head import Head
from .latent import LatentAttention
from .mlp import MLP
from .moe import MoE
from .recompute import runs
from .router import Routing, Rules


class Block(nn.Module):
    """Attention, then the feed-forward block, each on a normed copy of the stream and added back to it."""

    def __init__(self, spec: ModelSpec, mlp: nn.Module, recompute: str | None = None, dropout: float = 0.0):
        super().__init__()
        self.run, self.run_core = runs(recompute)
        self.input_layernorm = nn.RMSNorm(spec.hidden, eps=spec.norm_eps)
        self.self_attn = make_attention(spec, dropout)
        self.post_attention_layernorm = nn.RMSNorm(spec.hidden, eps=spec.norm_eps)
        self.mlp = mlp
        self.dropout = Dropout(dropout)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: LayerCache | None = None,
        routed: list[Routing] | None = None, real: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(batch, seq, hidden) → (batch, seq, hidden), with cos and sin (batch, 1, seq, rotated).

        What a mixture of experts has chosen is added to `routed`; of tokens that are not `real`, (batch, seq), it
        chooses nothing.
        """
        # what is random is drawn here, once: what is computed again in backward gets the same seeds
        seeds = self.self_attn.dropout.draw(), self.dropout.draw(), self.dropout.draw()
        # and so with what is chosen
        given = [Routing(self.mlp.gate, _real(real, cos))] if isinstance(self.mlp, MoE) else []
        x = self.run(self._forward, x, cos, sin, cache, *seeds, *given)
        if routed is not None:
            routed += given
        return x

    def _forward(self, x, cos, sin, cache, of_heads, of_attention, of_mlp, *given):
        x = x + self.dropout(
            self.self_attn(self.input_layernorm(x), cos, sin, cache, self.run_core, seed=of_heads), of_attention)
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x), *given), of_mlp)


def _real(real: torch.Tensor | None, cos: torch.Tensor) -> torch.Tensor:
    """Which tokens are there, (batch · seq,): all, if it is not said."""
    batch, _, seq, _ = cos.shape
    return torch.ones(batch * seq, dtype=torch.bool, device=cos.device) if real is None else real.flatten()


def make_attention(spec: ModelSpec, dropout: float = 0.0) -> Attention | LatentAttention:
    """The kind of attention that the spec asks for."""
    return LatentAttention(spec, dropout) if spec.latent else Attention(spec, dropout)


def make_mlp(spec: ModelSpec, layer: int, rules: Rules) -> nn.Module:
    """The kind of feed-forward block that the spec asks for in that layer."""
    if spec.experts is not None and layer >= spec.experts.first_dense:
        return MoE(spec, rules)
    return MLP(spec.hidden, spec.ffn, spec.mlp_bias)


class Transformer(nn.Module):
    """The model that `spec` describes. Weights come from `checkpoint.load` or `initialise`, not from the constructor.

    Built under `torch.device("meta")` it takes no memory until then. Tied embeddings are one parameter of two names.
    `recompute` says what training computes twice, to keep less: nothing, the attention cores ("selective") or the
    blocks ("full"); see `recompute`. `dropout` is the probability with which training drops a number of what attention
    puts out, before o_proj and after it, and of what the feed-forward block does. `rules` are those of its experts.
    Raises ValueError on another mode or probability, and on a model with layers that there are not here.
    """

    ends_early = True  # whether `generate` ends when all its sequences have; others may wait for what it computes

    def __init__(self, spec: ModelSpec, recompute: str | None = None, dropout: float = 0.0, rules: Rules | None = None):
        if spec.beyond_plain:
            raise ValueError(f"{spec.name} has {spec.beyond_plain}: the plain model computes no such layers")
        super().__init__()
        self.spec, self.rules = spec, rules or Rules()
        table = torch.empty(spec.vocab, spec.hidden)
        if not table.is_meta:  # normal_ on the meta device would import torch's compiler, two seconds on every rank
            table.normal_()
        self.embed_tokens = nn.Embedding(spec.vocab, spec.hidden, _weight=table)
        self.layers = nn.ModuleList(
            Block(spec, make_mlp(spec, layer, self.rules), recompute, dropout) for layer in range(spec.layers))
        self.norm = nn.RMSNorm(spec.hidden, eps=spec.norm_eps)
        self.lm_head = Head(spec.hidden, spec.vocab)
        if spec.tied:
            self.lm_head.weight = self.embed_tokens.weight

    def stream(
        self, tokens: torch.Tensor, positions: torch.Tensor | None = None, cache: KVCache | None = None,
        routed: list[Routing] | None = None, real: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Token ids (batch, seq) → (batch, seq, hidden), after the last norm, to be given to `lm_head`.

        In a model cut with sequence parallelism it is this rank's slice of it: `hidden` is the whole everywhere.
        """
        x = self.through(self.layers, self.embed_tokens(tokens), tokens.shape, positions, cache, routed, real)
        return self.norm(x)

    def through(self, layers: Iterable[nn.Module], x: torch.Tensor, shape: torch.Size,
                positions: torch.Tensor | None = None, cache: KVCache | None = None,
                routed: list[Routing] | None = None, real: torch.Tensor | None = None) -> torch.Tensor:
        """The stream `x` of tokens of `shape` (batch, seq) through some of the layers, in the same form; see `Block`
        for `routed` and `real`."""
        batch, seq = shape
        if positions is None:
            start = 0 if cache is None else cache.length
            positions = torch.arange(start, start + seq, device=x.device)
        # expanded, which takes no memory: of a stream that is cut, they still tell its batch and seq
        cos, sin = (y.expand(batch, -1, -1, -1) for y in rope.table(self.spec, positions, x.dtype))
        for layer, kept in zip(layers, repeat(None) if cache is None else cache.layers, strict=False):
            x = layer(x, cos, sin, kept, routed, real)
        return x

    def hidden(
        self, tokens: torch.Tensor, positions: torch.Tensor | None = None, cache: KVCache | None = None
    ) -> torch.Tensor:
        """Token ids (batch, seq) → (batch, seq, hidden), after the last norm.

        positions (seq,) or (batch, seq) are what RoPE turns by: by default they count on from the cache's length, or
        from 0. They don't change who attends to whom: a token attends to itself and all before it, cached ones too.
        """
        return self.lm_head.whole(self.stream(tokens, positions, cache), tokens.shape)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor | None = None, cache: KVCache | None = None
    ) -> torch.Tensor:
        """Token ids (batch, seq) → logits (batch, seq, vocab); `positions` and `cache` as for `hidden`."""
        return self.lm_head(self.stream(tokens, positions, cache), shape=tokens.shape)

    def loss(self, tokens: torch.Tensor, labels: torch.Tensor, valid: int | None = None,
             routed: list[Routing] | None = None, real: torch.Tensor | None = None) -> torch.Tensor:
        """The next-token cross-entropy, in nats, summed over labels other than -100 and divided by `valid`: a scalar.

        tokens and labels (batch, seq); labels[:, i] is the token that follows tokens[:, i]: shifted already. `valid`
        None is the number of those labels, and the loss their mean; see `head.cross_entropy`. `real` (batch, seq),
        bools, says which tokens are there, if not all: padding goes to no expert. What each layer of experts has chosen
        is added to `routed`; their load-balance loss is part of the loss, see `balance`.
        """
        if tokens.shape != labels.shape:
            raise ValueError(f"every token has a label: tokens {tuple(tokens.shape)}, labels {tuple(labels.shape)}")
        if real is not None and (real.shape != tokens.shape or real.dtype != torch.bool):
            raise ValueError(f"`real` says of each token whether it is there: bools {tuple(tokens.shape)}, not "
                             f"{real.dtype} {tuple(real.shape)}")
        chosen: list[Routing] = []
        loss = self.lm_head(self.stream(tokens, routed=chosen, real=real), labels, valid, tokens.shape)
        if routed is not None:
            routed += chosen
        return loss + self.balance(chosen, valid) if self.rules.balance and chosen else loss

    def balance(self, routed: list[Routing], valid: int | None = None) -> torch.Tensor:
        """The load-balance loss of a pass: the layers' sum (`router.Routing`) times its coefficient, weighted by the
        pass's tokens ÷ `valid`, as its cross-entropy is; by 1 if that is None. It takes the gradients out of them: who
        keeps what has been chosen keeps no graph."""
        total = torch.stack([each.balance for each in routed if each.balance is not None]).sum()
        for each in routed:
            each.balance = None if each.balance is None else each.balance.detach()
        return self.rules.balance * total * (1 if valid is None else routed[0].tokens / valid)

    def generate(
        self, tokens: torch.Tensor, new_tokens: int, stop: int | None = None, cached: bool = True
    ) -> torch.Tensor:
        """Continue tokens (batch, seq) with the likeliest next token, `new_tokens` times: see `generate.greedy`."""
        return greedy(self, tokens, new_tokens, stop, cached)
