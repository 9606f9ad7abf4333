"""How long a card computes and reads: floors from its dense arithmetic and its memory's bandwidth.

No run stands behind these figures here: they are what a card can't beat (a roofline, Williams et al., CACM 2009), and
real software takes longer. `share` is the part of the peak that it reaches.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from ..specs import CardSpec, Layout, ModelSpec, dtype_of
from ..specs.check import number, whole
from ..specs.layout import served
from .kv import kv_cache
from .memory import memory


def forward_flops(spec: ModelSpec, tokens: int, batch: int = 1) -> int:
    """FLOP of a forward pass over `batch` prompts of `tokens` tokens: 2 a token for each parameter that it uses, and
    those of causal attention.

    Counts all active parameters, the embedding's too, as is the custom (Kaplan et al., arXiv:2001.08361, §2.1); looking
    up a row takes no arithmetic.
    """
    return whole("batch", batch) * (2 * spec.active * whole("tokens", tokens) + attention_flops(spec, tokens))


def attention_flops(spec: ModelSpec, tokens: int) -> int:
    """FLOP of attention over one prompt of `tokens` tokens, in all layers, without its projections: 2 · layers ·
    tokens² · heads · head_dim, half of the square being masked. Windowed layers count their window."""
    whole("tokens", tokens)
    window = min(tokens, spec.window or 0)
    seen = tokens**2 * (spec.layers - spec.windowed_layers) + (2 * tokens * window - window**2) * spec.windowed_layers
    return seen * spec.heads * (spec.latent.nope_dim + spec.latent.rope_dim + spec.latent.value_dim if spec.latent
                                else 2 * spec.head_dim)


def training_flops(parameters: float, tokens: float) -> float:
    """FLOP of training: 6 a token for each parameter that the token uses, 2 forward and 4 backward, attention's square
    left out (Kaplan et al., arXiv:2001.08361, §2.1). Of a mixture of experts, `parameters` are the active ones."""
    return 6 * number("parameters", parameters) * number("tokens", tokens)


def utilisation(flop: float, seconds: float, cards: int, rate: float) -> float:
    """The share of the cards' peak that a run reached, MFU (PaLM, arXiv:2204.02311, appendix B): `flop` that the model
    needs, in `seconds` on `cards` of `rate` dense FLOP/s."""
    return number("flop", flop) / (number("seconds", seconds) * whole("cards", cards) * number("rate", rate))


def bound(flop: float, nbytes: float, card: CardSpec, dtype: str = "bf16") -> Literal["compute", "memory"]:
    """What work of `flop` on `nbytes` read from the card's memory waits for: the longer of the two."""
    compute, memory = number("flop", flop) / card.flop_rate(dtype), number("nbytes", nbytes) / card.hbm
    return "compute" if compute >= memory else "memory"


class Roofline(NamedTuple):
    """Work of `flop` on `nbytes` of memory: FLOP for each of those bytes; the seconds that it takes at least, and what
    it waits for."""

    flop: int
    nbytes: int
    intensity: float
    seconds: float
    bound: Literal["compute", "memory"]


def matmul(m: int, k: int, n: int, card: CardSpec, dtype: str = "bf16") -> Roofline:
    """The product of (m, k) and (k, n) on a card: 2 m k n FLOP, and each of the three matrices, all in `dtype`, read or
    written once (Williams, Waterman & Patterson, CACM 52(4), 2009). Compute binds where the intensity is `card.ridge`
    or more. Raises ValueError on sizes below 1, and on a dtype that is no plain one or none of the card's."""
    for side, length in (("m", m), ("k", k), ("n", n)):
        whole(side, length)
    flop, nbytes = 2 * m * k * n, (m * k + k * n + m * n) * dtype_of(dtype).bytes
    seconds = max(flop / card.flop_rate(dtype), nbytes / card.hbm)
    return Roofline(flop, nbytes, flop / nbytes, seconds, bound(flop, nbytes, card, dtype))


def bytes_read(spec: ModelSpec, layout: Layout | None = None, *, batch: int = 1, context: int = 1, dtype: str = "bf16",
               kv_dtype: str = "bf16") -> int:
    """Bytes that each rank reads for one decoding step of `batch` requests of `context` tokens each.

    All weights but the embedding, of which a token needs a row; of the routed experts, those that some token is sent
    to (`experts_met`): by expert parallelism, a token of any of the ranks that share them, each with as many requests.
    And every request's cache.
    """
    layout = served(layout)
    bill = memory(spec, layout, dtype)
    experts = bill.stored["experts"]
    weights = bill.weights - experts - (0 if spec.tied else bill.stored["embedding"])
    asking = -(-whole("batch", batch) * layout.ep * layout.expert_tp // layout.tp)
    experts = int(experts * experts_met(spec, asking))
    return weights + experts + whole("batch", batch) * kv_cache(spec, context, layout, kv_dtype)


def experts_met(spec: ModelSpec, batch: int) -> float:
    """The share of each layer's routed experts that a step of `batch` tokens needs: 1 − (1 − active/routed)^batch on
    average if the router is even. 1 without experts."""
    whole("batch", batch)
    return 1 - (1 - spec.experts.active / spec.experts.routed) ** batch if spec.experts else 1.0


def decode_floor(spec: ModelSpec, card: CardSpec, layout: Layout | None = None, *, batch: int = 1, context: int = 1,
                 dtype: str = "bf16", kv_dtype: str = "bf16") -> float:
    """Seconds that one decoding step takes at least: `bytes_read` at the speed of the card's memory, or the step's
    arithmetic, 2 a token for each active parameter, whichever takes longer. Nothing else counted, collectives neither.

    The arithmetic is the card's in bf16, or its fastest where it has none; it takes longer from a batch of about
    `card.ridge` tokens on.
    """
    read = bytes_read(spec, layout, batch=batch, context=context, dtype=dtype, kv_dtype=kv_dtype) / card.hbm
    rate = card.flops.get("bf16") or max(card.flops.values())
    return max(read, 2 * spec.active * batch / (rate * served(layout).tp))


def prefill_floor(spec: ModelSpec, card: CardSpec, layout: Layout | None = None, *, tokens: int,
                  arithmetic: str = "bf16", share: float = 1.0) -> float:
    """Seconds that a prompt of `tokens` tokens takes at least: its arithmetic on the ranks of a replica, at `share` of
    their peak in `arithmetic`. Raises ValueError where the card has no such arithmetic."""
    layout = served(layout)
    layout.check(spec)
    if number("share", share) > 1:
        raise ValueError(f"share = {share} is a part of the peak: 1 at most")
    return forward_flops(spec, tokens) / (layout.tp * card.flop_rate(arithmetic) * share)
