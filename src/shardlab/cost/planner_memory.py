"""What a rank of a layout holds at most, at once: a bound from above to search with.

`cost.pipeline` and `cost.training` have the bill, to the byte. Here a place of a pipeline has its parameters times
bytes, and of every micro-batch under way, weight gradients to come among them, what its stages keep.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from ..specs import Layout, ModelSpec, dtype_of
from .activations import activations
from .kv import width_of
from .memory_bill import OPTIMIZERS
from .saved import Term
from .step_time_pass import Shape


class Kept(NamedTuple):
    """Bytes of one micro-batch: that a dense layer keeps, one with experts, embedding and rotation, the head and loss;
    and what comes to it inside of a layer's backward pass, or of the loss's."""

    dense: float
    mixture: float
    first: float
    last: float
    again: float
    loss: float

    def of(self, shape: Shape) -> tuple[float, float]:
        """Bytes that a stage keeps, and has besides inside of a pass."""
        kept = (shape.dense * self.dense + shape.mixture * self.mixture + shape.first * self.first
                + shape.last * self.last)
        return kept, max(self.again if shape.dense or shape.mixture else 0, self.loss if shape.last else 0)


# of a layer that is computed again lightly: what norms, the gate's product and projections up from a latent put out
MADE_AGAIN = ("q, k, v in", "mlp in", "q latent", "kv latent", "experts out")
FROM_LATENT = ("queries", "keys", "values")
GATED = ("gate, silu, up, product", "experts", "shared experts")  # of which gate and up are kept
MULTIPLIED = ("q, k, v in", "mlp in", "sent to experts")  # what matrices take in


def kept_of(spec: ModelSpec, layout: Layout, batch: int, seq: int, dtype: str, arithmetic: str, recompute: str | None
            ) -> Kept:
    """What ranks keep that have all layers of the model, by the kernels of GPUs; `layout` leaves the pipeline out. What
    is multiplied in fp8 is kept so.

    "light" computes again what no large product puts out: norms, the gate's product, projections up from a latent; the
    router's weights are multiplied in before an expert's last product, whose output is then not kept. DeepSeek-V3 does
    so, and keeps the inputs of the gate's product in fp8 too (arXiv:2412.19437, §3.2.3, §3.3.3). Nothing here runs it.
    """
    mode = None if recompute == "light" else recompute
    bill = activations(spec, layout, batch=batch, seq=seq, dtype=dtype, recompute=mode, device="cuda")
    narrow = width_of(arithmetic) / bill.dtype.bytes
    each = [sum(_kept(term, recompute == "light", bool(spec.latent), narrow) for term in terms)
            for _, terms in bill.kinds]
    saved = bill.saved
    first, last = (sum(term.nbytes for term in terms) for terms in (
        saved.embedding(), [*saved.head(), *saved.loss(valid=True)]))
    return Kept(each[0], each[-1], first, last, bill.recomputed, bill.logits - bill.loss)


def _kept(term: Term, light: bool, latent: bool, narrow: float) -> float:
    """Bytes that are left of what a layer keeps."""
    if light and (term.what in MADE_AGAIN or (latent and term.what in FROM_LATENT)):
        return 0
    share = narrow if term.what in MULTIPLIED or (light and term.what in GATED) else 1
    return term.nbytes * share / (2 if light and term.what in GATED else 1)


class States(NamedTuple):
    """Bytes a parameter: of weights and gradients in the model's dtype, of what the optimizer steps, and of the part of
    the gradients that is kept apart under ZeRO."""

    width: int
    stepped: int
    part: int

    @classmethod
    def of(cls, dtype: str, optimizer: str) -> States:
        """What the optimizer keeps, in fp32 at least; below that also master weights."""
        if optimizer not in OPTIMIZERS:
            raise ValueError(f"unknown optimizer {optimizer!r}: use one of {', '.join(OPTIMIZERS)}")
        width, numbers = dtype_of(dtype).bytes, OPTIMIZERS[optimizer][0]
        return cls(width, 4 * numbers + 4, 4) if width < 4 else cls(width, numbers * width, 0)

    def each(self, layout: Layout, share_experts: bool) -> tuple[float, float]:
        """Of all states, a parameter: of spread experts, and of the rest."""
        spread = self._each(layout, layout.expert_replicas if share_experts else 1)
        return spread, self._each(layout, layout.data_ranks)

    def _each(self, layout: Layout, ranks: int) -> float:
        if not layout.zero:
            return 2 * self.width + self.stepped
        weights = self.width / (ranks if layout.zero == 3 else 1)
        gradients = self.width if layout.zero == 1 or ranks == 1 else 0 if self.part else self.width / ranks
        return weights + gradients + (self.stepped + self.part) / ranks


@cache
def live(kind: str, ranks: int, microbatches: int, chunks: int) -> list[list[tuple[int, int]]]:
    """For each place of the pipeline its stages, and of how many micro-batches each keeps activations at most: all in
    GPipe, min(p − r, m) in 1F1B, min(p, m) with weight gradients to come (ZB-H1, arXiv:2401.10241, §2.2); two for each
    rank from here on of the first of interleaved stages, and p of each other one; p − r on the way in and r + 1 on the
    way back in DualPipe. A bound from above, of the lists."""
    return list(_live(kind, ranks, microbatches, chunks))


def _live(kind: str, p: int, m: int, chunks: int) -> Iterator[list[tuple[int, int]]]:
    for r in range(p):
        if kind == "interleaved":
            yield [(r, min(2 * (p - r), m)), *((r + c * p, min(p, m)) for c in range(1, chunks))]
        elif kind in ("dualpipe", "dualpipe_v"):
            last = p - 1 if kind == "dualpipe" else 2 * p - 1
            yield [(r, last + 1 - r), (last - r, r + 1)]
        else:
            yield [(r, m if kind == "gpipe" else min(p if kind == "zero_bubble" else p - r, m))]
