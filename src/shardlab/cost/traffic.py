"""What each rank hands to its collectives in one forward pass, and in the backward pass behind it.

Exact in payload, call by call, for what `parallel.tensor.cut` and `parallel.grads.finish` do: two all-reduces a layer
forward and two backward (Megatron-LM, arXiv:1909.08053, §3), and those of embedding, head and loss. A block computed
again has one more in backward: the sum of its attention, but not that of its feed-forward block, before which PyTorch
stops since backward needs nothing behind it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..specs import Dtype, Layout, ModelSpec, dtype_of, padded
from ..specs.check import recompute_mode, whole
from ..specs.layout import layout_of
from ..specs.units import binary
from .bill import Bill, Row
from .comm import hops, serial_bytes

Phase = Literal["forward", "backward", "finish"]


@dataclass(frozen=True)
class Collective:
    """`count` equal calls of `op` over `ranks` ranks of the mesh's `axis`; `payload` is bytes of one call on one rank.

    Phase "finish" is after backward: gradients of weights that several ranks hold are summed, one call a tensor.
    """

    axis: str
    op: str
    phase: Phase
    what: str
    count: int
    payload: int
    ranks: int
    derivation: str

    @property
    def wire(self) -> float:
        """Bytes that a rank sends for one call if a ring does it: derived, not counted."""
        return serial_bytes(self.op, "ring", self.payload, self.ranks)

    @property
    def hops(self) -> int:
        """Messages that follow one another in one call, in a ring."""
        return hops(self.op, "ring", self.ranks)


@dataclass(frozen=True, repr=False)
class TrafficBill(Bill):
    """The collectives of one step, on each rank alike. Sums take the ops and phases to count; None is all."""

    spec: ModelSpec
    layout: Layout
    batch: int
    seq: int
    dtype: Dtype
    collectives: tuple[Collective, ...]
    recompute: str | None = None

    def where(self, op: str | None = None, phase: Phase | None = None) -> list[Collective]:
        """The collectives of that op and phase."""
        return [c for c in self.collectives if op in (None, c.op) and phase in (None, c.phase)]

    def total(self, op: str | None = None, phase: Phase | None = None) -> int:
        """Payload: bytes that a rank hands to its collectives."""
        return sum(c.count * c.payload for c in self.where(op, phase))

    def count(self, op: str | None = None, phase: Phase | None = None) -> int:
        """Number of calls."""
        return sum(c.count for c in self.where(op, phase))

    def wire(self, op: str | None = None, phase: Phase | None = None) -> float:
        """Bytes that a rank sends if rings do it (derived)."""
        return sum(c.count * c.wire for c in self.where(op, phase))

    def hops(self, op: str | None = None, phase: Phase | None = None) -> int:
        """Messages that follow one another if rings do it, one call after the other."""
        return sum(c.count * c.hops for c in self.where(op, phase))

    @property
    def title(self) -> str:
        again = f", {self.recompute} recomputation" if self.recompute else ""
        return (f"{self.spec.name}, tp = {self.layout.tp}, {self.batch} × {self.seq} tokens, {self.dtype.name}{again}: "
                "handed to collectives by each rank")

    @property
    def rows(self) -> list[Row]:
        rows = [Row(f"{c.phase}, {c.what}", f"{c.count} {c.op} × {c.derivation}", c.count * c.payload,
                    note=f"wire {binary(c.count * c.wire)}") for c in self.collectives]
        total = f"{self.count()} collectives, {self.hops():,} messages one after another"
        return [*rows, Row("total", total, self.total(), note=f"wire {binary(self.wire())}")]

    @property
    def footnotes(self) -> list[str]:
        return ["wire: what each rank sends if a ring does it; derived"] if self.collectives else []

    def to_dict(self) -> dict[str, Any]:
        """The bill as plain data: inputs, every collective with payload, wire and hops of one call, rows."""
        calls = [asdict(c) | {"wire": c.wire, "hops": c.hops} for c in self.collectives]
        inputs = {"model": self.spec.name, "tp": self.layout.tp, "batch": self.batch, "seq": self.seq,
                  "dtype": self.dtype.name, "recompute": self.recompute}
        return {**inputs, "collectives": calls, "payload": self.total(), "wire": self.wire(), **super().to_dict()}


def traffic(spec: ModelSpec, layout: Layout, batch: int, seq: int, dtype: str = "fp32", backward: bool = True,
            head: Literal["loss", "logits"] = "loss", recompute: str | None = None) -> TrafficBill:
    """The bill of one step on `batch` × `seq` tokens: a forward pass to the `head`, and `backward` from it.

    `head` "loss" ends in the vocabulary-parallel cross-entropy, "logits" in gathering the logits on every rank:
    `traffic(spec, layout, 1, 1, backward=False, head="logits")` is one token of generation. One rank has no traffic.
    `recompute` None, "selective" or "full" is the model's: what backward computes again, with its collectives.
    Raises ValueError on sizes below 1, an unknown dtype, head or mode, a model that is no Llama, and a layout that it
    doesn't allow.
    """
    if head not in ("loss", "logits"):
        raise ValueError(f"unknown head {head!r}: use loss or logits")
    layout = layout_of(layout)
    layout.check(spec)
    if spec.beyond_llama:
        raise ValueError(f"{spec.name} has {spec.beyond_llama}: the traffic of the Llama kind alone is known")
    step = _Step(spec, layout.tp, whole("batch", batch) * whole("seq", seq), dtype_of(dtype))
    full = recompute_mode(recompute) == "full"
    calls: list[Collective] = []
    if layout.tp > 1:
        calls += [*step.forward(), *(step.loss() if head == "loss" else step.logits())]
        calls += [*step.backward(full), *step.finish()] if backward else []
    return TrafficBill(spec, layout, batch, seq, step.dtype, tuple(calls), recompute)


@dataclass(frozen=True)
class _Step:
    """One pass of `tokens` tokens over `tp` ranks: who calls what."""

    spec: ModelSpec
    tp: int
    tokens: int
    dtype: Dtype

    def forward(self) -> Iterator[Collective]:
        """Sums of what the ranks looked up or computed in part."""
        yield self._hidden("forward", "embedding", 1)
        yield self._hidden("forward", "attention out", self.spec.layers)
        yield self._hidden("forward", "mlp out", self.spec.layers)

    def backward(self, again: bool) -> Iterator[Collective]:
        """Sums of the gradients that the ranks have of what all of them read; of blocks computed again, before that."""
        yield self._hidden("backward", "head in", 1)
        if again:
            yield self._hidden("backward", "attention out, again", self.spec.layers)
        yield self._hidden("backward", "mlp in", self.spec.layers)
        yield self._hidden("backward", "attention in", self.spec.layers)

    def loss(self) -> Iterator[Collective]:
        """Cross-entropy over a cut vocabulary: the largest logit, then exponentials and the target's logit."""
        precise = max(4, self.dtype.bytes)  # the loss is taken in fp32 at least
        for what, numbers in (("loss, largest logit", 1), ("loss, sum and target", 2)):
            text = f"{self._tokens} × {numbers} × {precise} B"
            yield self._call("all_reduce", "forward", what, 1, self.tokens * numbers * precise, text)

    def logits(self) -> Iterator[Collective]:
        """Each rank's part of the vocabulary, to every rank."""
        part = padded(self.spec.vocab, self.tp) // self.tp
        text = f"{self._tokens} × {part:,} × {self.dtype.bytes} B"
        yield self._call("all_gather", "forward", "logits", 1, self.tokens * part * self.dtype.bytes, text)

    def finish(self) -> Iterator[Collective]:
        """Gradients of weights that several ranks hold, each for its own heads: copied KV heads, norms of heads."""
        for tensor in self.spec.layer_tensors():
            copies = tensor.copies(self.tp)
            if tensor.cut in ("kv_heads", "shared") and copies > 1:
                shape = tensor.local_shape(self.tp)
                text = f"{' × '.join(f'{n:,}' for n in shape)} × {self.dtype.bytes} B"
                yield self._call("all_reduce", "finish", tensor.name.removesuffix(".weight"), self.spec.layers,
                                 math.prod(shape) * self.dtype.bytes, text, ranks=copies)

    @property
    def _tokens(self) -> str:
        return f"{self.tokens:,} token{'s' if self.tokens > 1 else ''}"

    def _hidden(self, phase: Phase, what: str, count: int) -> Collective:
        h, width = self.spec.hidden, self.dtype.bytes
        text = f"{self._tokens} × {h:,} × {width} B"
        return self._call("all_reduce", phase, what, count, self.tokens * h * width, text)

    def _call(self, op: str, phase: Phase, what: str, count: int, payload: int, derivation: str,
              ranks: int | None = None) -> Collective:
        return Collective("tp", op, phase, what, count, payload, ranks or self.tp, derivation)
