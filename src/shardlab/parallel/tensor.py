"""Tensor parallelism: every layer cut over all ranks, column then row (Megatron-LM, arXiv:1909.08053, §3).

A column-parallel layer holds some of the outputs, a row-parallel layer some of the inputs. One after the other they
need no communication between them: what the first puts out on a rank is what the second takes in there. The pair costs
one all-reduce forward, of the second's partial sums, and one backward, of the gradient of the first's input.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from ..comm.regions import gather_from
from ..model.attention import Attention
from ..model.head import IGNORED, Head
from ..model.mlp import MLP
from ..model.moe import MoE
from ..model.parameters import Window
from ..model.transformer import Block, Transformer
from ..specs import Layout, ModelSpec, padded
from . import grads, mesh, tensor_experts
from .linear import ColumnParallelLinear, RowParallelLinear
from .loss import vocab_parallel_cross_entropy
from .rng import ParallelDropout
from .sequence import Mode, check_mode, enter, leave, pad, unpad
from .shard import parameter, window
from .tensor_latent import ParallelLatentAttention


def cut(model: Transformer, group: dist.ProcessGroup, sequence_parallel: Mode = False,
        etp: int | None = None) -> Transformer:
    """Cut the plain `model` over the ranks of `group`, in place, and return it.

    Every rank of the group calls it. Each keeps its slices of the whole weights, which
    must be the same on all ranks, or on the meta device, to be read afterwards
    (`checkpoint.load` then reads this rank's slices only). `forward` still gives the
    whole logits (batch, seq, vocab) and `loss` the whole loss, on every rank; after
    `backward` call `grads.finish(model)`. `sequence_parallel` cuts the stream between
    the layers too, in one of two modes, "keep" or "again": see `sequence`. `etp` is how
    many of the ranks share an expert, all by default, or 1: see `tensor_experts`. Raises
    ValueError where the heads do not divide, naming the degrees that would do, on
    another mode or `etp`, and on a model that is cut already.
    """
    spec, mode = model.spec, sequence_parallel
    check_mode(mode)
    Layout(tp=group.size()).check(spec)
    if hasattr(model, "pipeline"):
        raise ValueError("this model has a pipeline, and here some of its layers: tensor.cut it before pipeline.cut")
    if hasattr(model, "context"):
        raise ValueError("this model's sequence is cut, and its attention in a ring: tensor.cut it before context.cut")
    if etp not in (None, 1, group.size()):
        raise ValueError(f"etp = {etp}: an expert is whole, 1, or cut over all {group.size()} ranks of the group")
    if group.size() == 1:
        return model
    if isinstance(model.lm_head, VocabParallelHead):
        raise ValueError("this model is cut already: cut the plain one")
    if hasattr(model, "reducer"):
        raise ValueError("this model has a data axis, which holds its parameters: cut it before that")
    if grads.spread(model):
        raise ValueError("this model's experts lie on several ranks already: tensor.cut it before expert.cut")
    if any(parametrize.is_parametrized(module) for module in model.modules()):
        raise ValueError("this model is quantised: cut the plain one, then quantise each part")
    tied = model.lm_head.weight is model.embed_tokens.weight
    model.embed_tokens = VocabParallelEmbedding(model.embed_tokens, group, mode)
    model.lm_head = VocabParallelHead(model.lm_head, group, mode)
    if tied:
        model.lm_head.weight = model.embed_tokens.weight
    p, kv_heads = group.size(), spec.kv_heads
    sharers = mesh.blocks(group, p // kv_heads) if kv_heads < p and not spec.latent else None  # of a KV head
    for layer in model.layers:
        assert isinstance(layer, Block)
        if isinstance(layer.self_attn, Attention):
            layer.self_attn = ParallelAttention(layer.self_attn, spec, group, mode, sharers)
        else:
            layer.self_attn = ParallelLatentAttention(layer.self_attn, spec, group, mode)
        if isinstance(layer.mlp, MoE):
            layer.mlp = tensor_experts.cut(layer.mlp, group, mode, etp or p)
        else:
            layer.mlp = ParallelMLP(layer.mlp, spec, group, mode)  # type: ignore[arg-type]
        layer.dropout = ParallelDropout(layer.dropout, group, sharded=bool(mode))
        if mode:  # each rank norms its own tokens
            grads.mark(layer.input_layernorm, partial=group)
            grads.mark(layer.post_attention_layernorm, partial=group)
    if mode:
        grads.mark(model.norm, partial=group)
    return model


class ParallelAttention(Attention):
    """Attention over this rank's heads: q, k, v cut by columns, o by rows."""

    def __init__(self, plain: Attention, spec: ModelSpec, group: dist.ProcessGroup,
                 mode: Mode, sharers: dist.ProcessGroup | None):
        with torch.device("meta"):
            super().__init__(spec)
        self.group, self.mode, d = group, mode, spec.head_dim
        queries, keys = _heads(spec.heads, group, d), _heads(spec.kv_heads, group, d)
        q_rows, kv_rows = queries.stop - queries.start, keys.stop - keys.start
        self.q_proj = ColumnParallelLinear(plain.q_proj, queries, q_rows)
        self.k_proj = ColumnParallelLinear(plain.k_proj, keys, kv_rows)
        self.v_proj = ColumnParallelLinear(plain.v_proj, keys, kv_rows)
        self.o_proj = RowParallelLinear(plain.o_proj, group, mode)
        self.dropout = ParallelDropout(plain.dropout, group, sharded=True)
        self.q_norm, self.k_norm = plain.q_norm, plain.k_norm
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:  # one weight for all heads, but gradients of own heads
                grads.mark(norm, partial=group)
        for proj, partial in ((self.q_proj, None), (self.k_proj, sharers), (self.v_proj, sharers)):
            for name in ("weight", "bias"):
                grads.mark(proj, name, cut=group, partial=partial)

    def project(self, x: torch.Tensor, tokens: int) -> Sequence[torch.Tensor]:
        layers = self.q_proj, self.k_proj, self.v_proj
        outputs = enter(x, layers, self.group, self.mode)
        return [unpad(y, tokens) for y in outputs] if self.mode else outputs


class ParallelMLP(MLP):
    """The feed-forward block over this rank's hidden units: gate and up column-parallel, down row-parallel."""

    def __init__(self, plain: MLP, spec: ModelSpec, group: dist.ProcessGroup, mode: Mode = False):
        with torch.device("meta"):
            super().__init__(spec.hidden, spec.ffn, spec.mlp_bias)
        self.group, self.mode, p = group, mode, group.size()
        units, size = window(spec.ffn, p, group.rank(), dim=0), padded(spec.ffn, p) // p
        self.gate_proj = ColumnParallelLinear(plain.gate_proj, units, size)
        self.up_proj = ColumnParallelLinear(plain.up_proj, units, size)
        self.down_proj = RowParallelLinear(plain.down_proj, group, mode)
        for proj in (self.gate_proj, self.up_proj):
            for name in ("weight", "bias"):
                grads.mark(proj, name, cut=group)

    def project(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        return enter(x, (self.gate_proj, self.up_proj), self.group, self.mode)


class VocabParallelEmbedding(nn.Embedding):
    """Some rows of the table (vocab, hidden): tokens of other ranks' rows come out as zeros, then all are summed."""

    def __init__(self, whole: nn.Embedding, group: dist.ProcessGroup, mode: Mode = False):
        n, p = whole.num_embeddings, group.size()
        size = padded(n, p) // p
        super().__init__(size, whole.embedding_dim, _weight=torch.empty(size, whole.embedding_dim, device="meta"))
        self.group, self.mode = group, mode
        self.vocab, self.rows = n, window(n, p, group.rank(), dim=0)
        self.weight = parameter(whole.weight, self.rows, size)
        grads.mark(self, cut=group)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, seq) → (batch, seq, hidden), or with sequence parallelism this rank's rows of it, (rows, hidden).

        Raises ValueError on a token outside the vocabulary.
        """
        check_tokens(tokens, self.vocab)
        if self.mode:
            tokens = pad(tokens.flatten(), self.group)
        mine = (tokens >= self.rows.start) & (tokens < self.rows.stop)
        x = F.embedding((tokens - self.rows.start).where(mine, 0), self.weight)
        return leave(x.where(mine.unsqueeze(-1), 0), self.group, self.mode)


class VocabParallelHead(Head):
    """Some rows of the output head (vocab, hidden): each rank has the logits of some of the tokens."""

    def __init__(self, whole: Head, group: dist.ProcessGroup, mode: Mode = False):
        n, p = whole.out_features, group.size()
        size = padded(n, p) // p
        with torch.device("meta"):
            super().__init__(whole.in_features, size)
        self.group, self.mode = group, mode
        self.vocab, self.rows = n, window(n, p, group.rank(), dim=0)
        self.weight = parameter(whole.weight, self.rows, size)
        grads.mark(self, cut=group)

    def forward(self, h: torch.Tensor, labels: torch.Tensor | None = None, valid: int | None = None,
                shape: torch.Size | None = None) -> torch.Tensor:
        """(batch, seq, hidden) → all logits (batch, seq, vocab), on every rank, or with labels the cross-entropy, from
        this rank's logits and three numbers a token from the others. With `shape` (batch, seq), h is the stream."""
        if labels is not None:
            check_tokens(labels[labels != IGNORED], self.vocab)
        (logits,) = enter(h, [self], self.group, self.mode if shape else False)
        if shape:
            logits = unpad(logits.view(-1, logits.shape[-1]), shape.numel())
            logits = logits.view(*shape, logits.shape[-1])
        if labels is not None:
            return vocab_parallel_cross_entropy(logits, labels, self.rows, self.group, valid)
        return gather_from(logits, self.group)[..., : self.vocab]

    def whole(self, stream: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        if not self.mode:
            return stream
        return unpad(gather_from(stream, self.group, 0), shape.numel()).view(*shape, stream.shape[-1])


def check_tokens(tokens: torch.Tensor, vocab: int) -> None:
    """Raise ValueError where a token is outside the vocabulary, which a rank would take for another rank's."""
    outside = tokens[(tokens < 0) | (tokens >= vocab)]
    if outside.numel():
        raise ValueError(f"token {outside[0].item()} is outside the vocabulary of {vocab}")


def _heads(heads: int, group: dist.ProcessGroup, head_dim: int) -> Window:
    """The rows of this rank's heads; with fewer heads than ranks, neighbouring ranks hold the same one."""
    first, count = group.rank() * heads // group.size(), max(1, heads // group.size())
    return Window(dim=0, start=first * head_dim, stop=(first + count) * head_dim, full=heads * head_dim)
