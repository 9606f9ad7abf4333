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
from .put_off import head_put_off, layer_put_off
from .saved import Term
from .step_time_pass import Shape


class Kept(NamedTuple):
    """Bytes of one micro-batch: that a dense layer keeps, one with experts, the embedding, head and loss, and all
    layers of what turns queries and keys; and what comes to it inside of a layer's backward pass, or the loss's."""

    dense: float
    mixture: float
    first: float
    last: float
    turned: float
    again: float = 0.0
    loss: float = 0.0

    def of(self, shape: Shape) -> tuple[float, float]:
        """Bytes that a stage keeps, and has besides inside of a pass."""
        layers = shape.dense + shape.mixture > 0
        kept = (shape.dense * self.dense + shape.mixture * self.mixture + shape.first * self.first
                + shape.last * self.last + layers * self.turned)
        return kept, max(layers * self.again, shape.last * self.loss)


# of a layer that is computed again lightly: what norms, the gate's product and projections up from a latent put out
MADE_AGAIN = ("q, k, v in", "mlp in", "q latent", "kv latent", "experts out")
FROM_LATENT = ("queries", "keys", "values")
GATED = ("gate, silu, up, product", "experts", "shared experts")  # of which gate and up are kept
MULTIPLIED = ("q, k, v in", "mlp in", "sent to experts")  # what matrices take in


def kept_of(spec: ModelSpec, layout: Layout, batch: int, seq: int, dtype: str, arithmetic: str, recompute: str | None
            ) -> tuple[Kept, Kept]:
    """What ranks keep that have all layers of the model, by the kernels of GPUs: until backward, and from the input's
    half of it to the weights', where it is split. `layout` leaves the pipeline out. What is multiplied in fp8 is kept
    so.

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
    first, last, turned = (sum(term.nbytes for term in terms) for terms in (
        saved.embedding(), [*saved.head(), *saved.loss(valid=True)], saved.rotation()))
    late = [sum(term.nbytes for term in layer_put_off(saved, mixture)) * narrow
            for mixture in (False, spec.experts is not None)]
    head = sum(term.nbytes for term in head_put_off(saved))
    return (Kept(each[0], each[-1], first, last, turned, bill.recomputed, bill.logits - bill.loss),
            Kept(late[0], late[1], 0, head, 0))


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


class Moment(NamedTuple):
    """Of how many micro-batches a place keeps activations, as (stage, how many), and of how many what is put off."""

    live: tuple[tuple[int, int], ...]
    late: int = 0


@cache
def fullest(kind: str, ranks: int, microbatches: int, chunks: int) -> list[list[Moment]]:
    """For each place of the pipeline the moments at which it may hold most. All micro-batches in GPipe, min(p − r, m)
    in 1F1B; of interleaved stages what has come in p at a time and not gone out so. In ZB-H1 r of p
    are put off, or one more where the next forward pass is yet to come. In DualPipe p − r on the way in and r + 1 on
    the way back (of 2p ranks in DualPipeV), none put off; or one; and at the end as many put off as on the way back.
    Bounds from above, of the lists that run.
    """
    return [list(_fullest(kind, ranks, microbatches, chunks, r)) for r in range(ranks)]


def _fullest(kind: str, p: int, m: int, chunks: int, r: int) -> Iterator[Moment]:
    if kind == "interleaved":
        yield from (Moment(tuple((r + c * p, n) for c, n in enumerate(counts))) for counts in _in_turn(p, m, chunks, r))
    elif kind == "zero_bubble":
        for late in (r, r + 1):
            yield Moment(((r, min(p - late, m)),), min(late, m))
    elif kind in ("dualpipe", "dualpipe_v"):
        last, depths = (p - 1, p // 2) if kind == "dualpipe" else (2 * p - 1, p)
        depth = min(r, p - 1 - r) if kind == "dualpipe" else r
        here, there = sorted((r, last - r))  # a micro-batch comes in at either end of DualPipe
        yield Moment(((here, 2 * depths - depth), (there, depth + 1)))
        yield Moment(((here, 2 * depths - depth - 1), (there, depth)), 1)
        yield Moment(((here, depths - 1 - depth), (there, 0)), depth + 1)
    else:
        yield Moment(((r, m if kind == "gpipe" else min(p - r, m)),))


def _in_turn(p: int, m: int, chunks: int, r: int) -> Iterator[tuple[int, ...]]:
    """Of interleaved stages (arXiv:2104.04473, §2.2): micro-batches of each stage, where p of them have passed one."""
    passes = min(m, 3 * p) * chunks  # what it does in its middle it does over and over
    ahead = min(2 * (p - r - 1) + (chunks - 1) * p, passes - 1)
    counts, seen = [0] * chunks, set()
    for i in range(passes):
        counts[i // p % chunks] += 1
        if i >= ahead:
            if (i + 1) % p == 0 or (i - ahead) % p in (0, p - 1):
                seen.add(tuple(counts))
            counts[chunks - 1 - (i - ahead) // p % chunks] -= 1
    yield from seen
