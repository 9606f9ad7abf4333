"""Tensor parallelism: every layer cut over all ranks, column then row (Megatron-LM, arXiv:1909.08053, §3).

A column-parallel layer holds some of the outputs, a row-parallel layer some of the inputs. One after the other they
need no communication between them: what the first puts out on a rank is what the second takes in there. The pair costs
one all-reduce forward, of the second's partial sums, and one backward, of the gradient of the first's input.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ..comm.regions import copy_to, gather_from, reduce_from
from ..model.checkpoint import Window
from ..model.transformer import MLP, Attention, Head, Transformer
from ..specs import Layout, ModelSpec, padded
from . import grads, mesh
from .loss import vocab_parallel_cross_entropy
from .shard import parameter, window


def cut(model: Transformer, group: dist.ProcessGroup) -> Transformer:
    """Cut the plain `model` over the ranks of `group`, in place, and return it. Every rank of the group calls it.

    Each rank keeps its slices of the whole weights, which must be the same on all ranks, or on the meta device, to be
    read afterwards (`checkpoint.load` then reads this rank's slices only). `forward` still gives the whole logits
    (batch, seq, vocab) and `loss` the whole loss, on every rank; after `backward` call `grads.finish(model)`.
    Raises ValueError where the heads do not divide by the group's size, naming the sizes that would do.
    """
    spec = model.spec
    Layout(tp=group.size()).check(spec)
    if group.size() == 1:
        return model
    tied = model.lm_head.weight is model.embed_tokens.weight
    model.embed_tokens = VocabParallelEmbedding(model.embed_tokens, group)
    model.lm_head = VocabParallelHead(model.lm_head, group, weight=model.embed_tokens.weight if tied else None)
    for layer in model.layers:
        layer.self_attn = ParallelAttention(layer.self_attn, spec, group)
        layer.mlp = ParallelMLP(layer.mlp, spec, group)
    return model


class ColumnParallelLinear(nn.Module):
    """Y_r = X W_rᵀ + b_r: some rows of W (out, in), hence some of the outputs, (…, in) → (…, out/p).

    Its input must have entered the region by `copy_to`. That is left to the caller because layers which share their
    input (q, k and v; gate and up) then share one all-reduce in backward.
    """

    def __init__(self, whole: nn.Linear, rows: Window, size: int):
        super().__init__()
        self.weight = parameter(whole.weight, rows, size)
        self.bias = parameter(whole.bias, rows, size) if whole.bias is not None else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """Y = Σ_r X_r W_rᵀ + b: some columns of W (out, in), hence some of the inputs, (…, in/p) → (…, out), summed."""

    def __init__(self, whole: nn.Linear, group: dist.ProcessGroup):
        super().__init__()
        self.group, p = group, group.size()
        n = whole.in_features
        self.weight = parameter(whole.weight, window(n, p, group.rank(), dim=1), padded(n, p) // p)
        self.bias = whole.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = reduce_from(F.linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias  # after the sum: a bias on every rank would come p times


class ParallelAttention(Attention):
    """Attention over this rank's heads: q, k, v column-parallel by whole heads, o row-parallel."""

    def __init__(self, plain: Attention, spec: ModelSpec, group: dist.ProcessGroup):
        with torch.device("meta"):
            super().__init__(spec)
        self.group, p, r = group, group.size(), group.rank()
        heads, kv_heads = spec.heads // p, max(1, spec.kv_heads // p)
        first_kv = r * spec.kv_heads // p  # with fewer KV heads than ranks, neighbours hold the same one
        self.q_proj = ColumnParallelLinear(plain.q_proj, _heads(r * heads, heads, spec.heads, spec), heads * spec.head_dim)
        rows = _heads(first_kv, kv_heads, spec.kv_heads, spec)
        self.k_proj = ColumnParallelLinear(plain.k_proj, rows, kv_heads * spec.head_dim)
        self.v_proj = ColumnParallelLinear(plain.v_proj, rows, kv_heads * spec.head_dim)
        self.o_proj = RowParallelLinear(plain.o_proj, group)
        self.q_norm, self.k_norm = plain.q_norm, plain.k_norm
        for norm in (self.q_norm, self.k_norm):  # the same weight for all heads: each rank has its own heads' part
            if norm is not None:
                grads.mark_partial(norm.weight, group)
        if spec.kv_heads < p:
            sharers = mesh.blocks(group, p // spec.kv_heads)
            for held in (*self.k_proj.parameters(), *self.v_proj.parameters()):
                grads.mark_partial(held, sharers)

    def forward(self, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        return super().forward(copy_to(x, self.group), *args, **kwargs)


class ParallelMLP(MLP):
    """The feed-forward block over this rank's share of the hidden units: gate and up column-parallel, down row-parallel."""

    def __init__(self, plain: MLP, spec: ModelSpec, group: dist.ProcessGroup):
        with torch.device("meta"):
            super().__init__(spec)
        self.group, p = group, group.size()
        units, size = window(spec.ffn, p, group.rank(), dim=0), padded(spec.ffn, p) // p
        self.gate_proj = ColumnParallelLinear(plain.gate_proj, units, size)
        self.up_proj = ColumnParallelLinear(plain.up_proj, units, size)
        self.down_proj = RowParallelLinear(plain.down_proj, group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(copy_to(x, self.group))


class VocabParallelEmbedding(nn.Module):
    """Some rows of the table (vocab, hidden): a token another rank holds is looked up as zeros here, then all are summed."""

    def __init__(self, whole: nn.Embedding, group: dist.ProcessGroup):
        super().__init__()
        self.group, p, self.vocab = group, group.size(), whole.num_embeddings
        self.rows = window(self.vocab, p, group.rank(), dim=0)
        self.weight = parameter(whole.weight, self.rows, padded(self.vocab, p) // p)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, seq) → (batch, seq, hidden). Raises ValueError on a token outside the vocabulary."""
        check_tokens(tokens, self.vocab)
        mine = (tokens >= self.rows.start) & (tokens < self.rows.stop)
        x = F.embedding((tokens - self.rows.start).where(mine, 0), self.weight)
        return reduce_from(x.where(mine.unsqueeze(-1), 0), self.group)


class VocabParallelHead(Head):
    """Some rows of the output head (vocab, hidden): each rank has the logits of some of the tokens."""

    def __init__(self, whole: Head, group: dist.ProcessGroup, weight: nn.Parameter | None):
        with torch.device("meta"):
            super().__init__(whole.in_features, whole.out_features)
        self.group, p = group, group.size()
        self.rows = window(whole.out_features, p, group.rank(), dim=0)
        self.weight = parameter(whole.weight, self.rows, padded(whole.out_features, p) // p) if weight is None else weight

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """(batch, seq, hidden) → all logits (batch, seq, vocab), on every rank."""
        logits = F.linear(copy_to(h, self.group), self.weight)
        return gather_from(logits, self.group)[..., : self.out_features]

    def loss(self, h: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy, from this rank's logits and three numbers a token from the others."""
        check_tokens(labels[labels != -100], self.out_features)
        logits = F.linear(copy_to(h, self.group), self.weight)
        return vocab_parallel_cross_entropy(logits, labels, self.rows, self.group)


def check_tokens(tokens: torch.Tensor, vocab: int) -> None:
    """Raise ValueError where a token is outside the vocabulary, which a rank would take for another rank's."""
    if tokens.numel() and not (0 <= (low := int(tokens.min())) and (high := int(tokens.max())) < vocab):
        raise ValueError(f"token {low if low < 0 else high} is outside the vocabulary of {vocab}")


def _heads(first: int, count: int, full: int, spec: ModelSpec) -> Window:
    d = spec.head_dim
    return Window(dim=0, start=first * d, stop=(first + count) * d, full=full * d)
