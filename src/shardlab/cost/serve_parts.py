"""What the stages of a served model are, for the time of a step: FLOP a token, bytes of weights, and attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from ..specs import Layout, ModelSpec
from .kv import kv_cache
from .memory import memory
from .places import alone, places, rank_at
from .queueing import Alike, Work


def unspread(layout: Layout) -> Layout:
    """The ranks of a stage without expert parallelism: what caches and activations go by, wherever experts are."""
    return replace(alone(layout), ep=1)


class Part(NamedTuple):
    """One stage's layers and ends on a rank: FLOP a new token in matrices; FLOP of the head for each request; bytes of
    weights that every step reads, and of routed experts, that tokens choose from; how many layers, of them with
    experts; which ends."""

    flop: float
    head: float
    nbytes: int
    experts: int
    layers: int
    mixture: int
    first: bool
    last: bool


class Attention(NamedTuple):
    """Of one layer on one rank: FLOP for each pair of a query and a key it sees, bytes of cache for each token of
    context. Of a latent there are two ways: queries are turned to it (`pair` of that is larger), or keys and values are
    made of it, at `up` FLOP for each token that was cached before."""

    pair: float
    nbytes: float
    absorbed: float | None = None
    up: float = 0.0

    def flop(self, new: int, context: int, pairs: float) -> float:
        """Of `new` tokens at the end of `context`; of a latent the way with fewer."""
        flop = pairs * self.pair
        return flop if self.absorbed is None else min(flop + (context - new) * self.up, pairs * self.absorbed)


def parts_of(spec: ModelSpec, layout: Layout, dtype: str, redundant: int) -> Iterator[Part]:
    """The stages, from the account of their weights."""
    experts = spec.experts
    for place in places(spec, layout):
        bill = memory(spec, layout, dtype, rank=rank_at(layout, place.number, 0), redundant=redundant)
        layers = [layer for stage in place.stages for layer in stage.layers]
        first, last = any(stage.first for stage in place.stages), any(stage.last for stage in place.stages)
        table = "embedding" if spec.tied else "head"
        skipped = 0 if spec.tied and last else bill.stored["embedding"]  # a token needs a row of it
        own = layout.expert_tp / layout.tp  # the part of the tokens that a rank routes
        per_token: float = 2 * sum(bill.elements[group] for group in ("attention", "mlp"))
        per_token += 2 * own * sum(bill.elements[group] for group in ("shared", "router"))
        if experts:
            per_token += 2 * own * bill.elements["experts"] * layout.ep * experts.active / (
                experts.routed + redundant)
        yield Part(per_token, 2 * bill.elements[table] if last else 0.0,
                   bill.weights - skipped - bill.stored["experts"], bill.stored["experts"], len(layers),
                   sum(layer >= experts.first_dense for layer in layers) if experts else 0, first, last)


def attention_of(spec: ModelSpec, layout: Layout, kv_dtype: str) -> Attention:
    """Of any layer: one token's cache is the same in all of them."""
    heads, nbytes = spec.heads / layout.tp, kv_cache(spec, 1, unspread(layout), kv_dtype) / spec.layers
    if (latent := spec.latent) is None:
        return Attention(4 * heads * spec.head_dim, nbytes)
    return Attention(2 * heads * (latent.nope_dim + latent.rope_dim + latent.value_dim), nbytes,
                     2 * heads * (2 * latent.kv_rank + latent.rope_dim),
                     2 * heads * latent.kv_rank * (latent.nope_dim + latent.value_dim))


def seen(work: Work, spec: ModelSpec) -> Iterator[tuple[int, int, int, float, float]]:
    """Of each kind of request in a step: how many there are, new tokens, context, pairs of a query and a key that one
    sees, tokens whose cache is read. The last two are means over layers, of which windowed ones see and keep less."""
    share, window = spec.windowed_layers / spec.layers, spec.window
    counts = work.counts if isinstance(work, Alike) else Counter(work)
    for (new, context), times in counts.items():  # a step of equal decodes is one line
        if not 1 <= new <= context:
            raise ValueError(f"({new}, {context}) is no work: one new token or more, of a context that counts them in")
        pairs, read = new * context - new * (new - 1) / 2, float(context)
        if window:
            before = context - new
            short = min(new, max(0, window - before))  # those whose window reaches back to the first token
            near = short * before + short * (short + 1) / 2 + (new - short) * window
            pairs = (1 - share) * pairs + share * near
            read = (1 - share) * context + share * min(context, window)
        yield times, new, context, pairs, read
