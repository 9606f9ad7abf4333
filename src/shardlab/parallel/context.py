"""Context parallelism: the sequence cut over ranks, through all layers, for what one rank can't hold of it.

Most of a layer looks at one token at a time, and a rank does it for its own tokens with the whole weights. Attention
alone looks at others, and goes round in a ring (see `ring`). Every rank is given the same whole batch (in debug mode
they check that it is) and takes its tokens of it, in `zigzag` order, padded to a multiple of 2p: tokens, labels,
positions and what says which tokens are there. Padding has no label, goes to no expert, and comes after all tokens, so
that none attends to it.

Weights are the same on all ranks, and each has a part of their gradients, of its own tokens: ranks of the context are
ranks of the data axis too, which sums them. With dp replicas of cp ranks,

    tensor.cut(model, tp)                                   # if at all; then expert.cut
    context.cut(model, cp)                                  # the ranks that share a sequence
    data.replicate(model, dp_cp)                            # or zero.shard, over all ranks of both
    valid = loss.valid_tokens([labels], dp)                 # each label once: over ranks with different data
    model.loss(tokens, labels, valid).backward()            # of the whole sequences, on each of their ranks
    grads.finish(model)

A pipeline is cut behind it: its stages hand on each rank's part of the stream (`execute`).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..comm.settings import now
from ..model.cache import KVCache
from ..model.head import IGNORED
from ..model.router import Routing
from ..model.transformer import Block, Transformer
from ..specs import padded
from .agreement import agree
from .ring import attend
from .rng import ParallelDropout
from .zigzag import join, share


class Own(NamedTuple):
    """What of a batch is this rank's: tokens (batch, tokens a rank), their places in the sequence, None if they count
    from 0, and which of them are there, None if all are."""

    tokens: torch.Tensor
    positions: torch.Tensor | None
    real: torch.Tensor | None


class Context(NamedTuple):
    """The ranks that share a sequence."""

    group: dist.ProcessGroup

    def own(self, tokens: torch.Tensor, positions: torch.Tensor | None = None, real: torch.Tensor | None = None) -> Own:
        """This rank's part of whole token ids (batch, seq). In debug mode, raises ValueError on all ranks where one was
        given others."""
        seq = tokens.shape[-1]
        _same(tokens, self.group)
        if positions is None:
            positions = torch.arange(seq, device=tokens.device)
        if real is None and seq % (2 * self.group.size()):
            real = torch.ones_like(tokens, dtype=torch.bool)
        return Own(share(tokens, self.group, 0), share(positions, self.group, 0),
                   None if real is None else share(real, self.group, False))

    def own_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """This rank's of whole labels (batch, seq); padding has none."""
        _same(labels, self.group)
        return share(labels, self.group, IGNORED)


def own_of(model: Transformer, tokens: torch.Tensor, real: torch.Tensor | None = None) -> Own:
    """What of a micro-batch, tokens (batch, seq), runs here: all of it, or this rank's part of its sequences."""
    context = getattr(model, "context", None)
    return Own(tokens, None, real) if context is None else context.own(tokens, real=real)


def cut(model: Transformer, group: dist.ProcessGroup) -> Transformer:
    """Have the ranks of `group` share each sequence, in place, and return the model.

    Every rank of the group calls it, on the plain model or one cut over a tensor axis, with sequence parallelism or
    without, before the data axis, which must take in these ranks: `grads.finish` raises RuntimeError where it does not.
    `forward` and `hidden` take the whole tokens (batch, seq) on every rank and give the whole result; `loss` gives this
    rank's part, and the ranks' sum is the whole. With dropout call `rng.seed`: each rank drops numbers of its own.
    Rules for experts (capacity, balance) hold for each rank's tokens, as on a data axis. Raises ValueError on a model
    that has a context, a pipeline or a data axis already, and on attention that can't be put in a ring.
    """
    if hasattr(model, "context"):
        raise ValueError("this model's sequence is cut already: cut the one without")
    if hasattr(model, "pipeline"):
        raise ValueError("this model has a pipeline, and here some of its layers: context.cut it before pipeline.cut")
    if hasattr(model, "reducer"):
        raise ValueError("this model has a data axis already: cut the sequence first, then replicate or shard the "
                         "model over all ranks that have tokens of their own")
    if type(model) is not Transformer:
        raise ValueError(f"{type(model).__name__} is no plain Transformer, and may do with a sequence what is not "
                         "known here")
    layers = [layer for layer in model.layers if isinstance(layer, Block)]
    if other := [type(layer.self_attn).__name__ for layer in layers if not hasattr(layer.self_attn, "attend")]:
        raise ValueError(f"{other[0]} does not say where its heads attend, so they can't be put in a ring: it needs an "
                         "attribute `attend`")
    if group.size() == 1:
        return model
    for layer in layers:
        layer.self_attn.attend = partial(attend, group=group)
        for each in (layer, layer.self_attn):
            each.dropout = ParallelDropout(each.dropout, group, sharded=True)
    model.__class__ = CutTransformer
    model.context = Context(group)  # type: ignore[assignment]
    return model


class CutTransformer(Transformer):
    """A model whose sequences are cut over the ranks of `context.group`."""

    context: Context

    def stream(
        self, tokens: torch.Tensor, positions: torch.Tensor | None = None, cache: KVCache | None = None,
        routed: list[Routing] | None = None, real: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Whole token ids (batch, seq) → the stream of this rank's tokens (batch, tokens a rank, hidden), after the
        last norm; see `Transformer.stream`. Raises ValueError on a cache, and in debug mode where ranks were given
        different tokens."""
        if cache is not None:
            raise ValueError("a cut sequence has no KV cache: generate(…, cached=False) computes all tokens again, or "
                             "take the plain model to generate")
        own = self.context.own(tokens, positions, real)
        return super().stream(own.tokens, own.positions, None, routed, own.real)

    def hidden(
        self, tokens: torch.Tensor, positions: torch.Tensor | None = None, cache: KVCache | None = None
    ) -> torch.Tensor:
        """As `Transformer.hidden`, the same on every rank, which must use it in the same way and without the model's
        weights: a head that each applies to the whole would have its gradient summed p times; `forward` does it once.
        """
        stream = self.stream(tokens, positions, cache)
        return join(self.lm_head.whole(stream, self._shape(tokens)), self.context.group, tokens.shape[-1])

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor | None = None, cache: KVCache | None = None
    ) -> torch.Tensor:
        """As `Transformer.forward`, the same on every rank, which must use it in the same way."""
        stream = self.stream(tokens, positions, cache)
        return join(self.lm_head(stream, shape=self._shape(tokens)), self.context.group, tokens.shape[-1])

    def loss(self, tokens: torch.Tensor, labels: torch.Tensor, valid: int | None = None,
             routed: list[Routing] | None = None, real: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's part of what `Transformer.loss` gives for whole tokens and labels (batch, seq): all ranks' sum.

        `valid` None is the number of labels in the whole. What is added to `routed` is of this rank's tokens.
        Raises ValueError as `stream` does, and where a data axis of several replicas needs a `valid`.
        """
        if tokens.shape != labels.shape:
            raise ValueError(f"every token has a label: tokens {tuple(tokens.shape)}, labels {tuple(labels.shape)}")
        group = self.context.group
        chosen: list[Routing] = []
        own = self.context.own_labels(labels)
        reducer = getattr(self, "reducer", None)
        if valid is None and torch.is_grad_enabled() and reducer is not None and reducer.group.size() > group.size():
            raise ValueError(f"gradients are summed over {reducer.group.size()} ranks, {group.size()} of which share a "
                             "sequence, so give the number of labels of all: valid = loss.valid_tokens([labels], dp), "
                             "over the ranks dp that have different data")
        among = int((labels != IGNORED).sum()) if valid is None else valid
        stream = self.stream(tokens, routed=chosen, real=real)
        loss = self.lm_head(stream, own, among, self._shape(tokens))
        if routed is not None:
            routed += chosen
        if not (self.rules.balance and chosen):
            return loss
        there = tokens.numel() if real is None else int(real.sum())
        return loss + self.balance(chosen, there if valid is None else valid)

    def _shape(self, tokens: torch.Tensor) -> torch.Size:
        """(batch, tokens a rank)."""
        p = self.context.group.size()
        return torch.Size((len(tokens), padded(tokens.shape[-1], 2 * p) // p))


def _same(given: torch.Tensor, group: dist.ProcessGroup) -> None:
    """In debug mode, raise ValueError on all ranks where one was given others: they would attend to each other's."""
    if now().debug:
        agree(repr(given.shape).encode() + given.cpu().numpy().tobytes(), group, "was given a sequence")
