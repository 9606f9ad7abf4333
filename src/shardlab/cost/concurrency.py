"""How many requests fit at once: a card's room over a card's share of a request, never over a whole request.

    requests = (a card's memory − weights − work − buffers) ÷ bytes of one request's cache on that card

All cards of a group hold a part of every request, so a group holds as many as one of its cards does. Divide one card's
room by what the whole group caches for a request, and eight cards hold an eighth of what they hold.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..specs import CardSpec, Layout, LinkSpec, ModelSpec, find_link
from ..specs.check import number, whole
from ..specs.layout import layout_of, served
from ..specs.units import decimal
from .activations import forward_peak
from .bill import Bill, Row
from .kv import kv_cache
from .memory import memory
from .places import Place, alone, places, rank_at
from .serve_parts import unspread
from .serving import serving
from .training import RESERVE, reserved


@dataclass(frozen=True, repr=False, eq=False)
class Concurrency(Bill):
    """What a card has for caches, and what a request takes of it, on the card that is full first.

    `room` is bytes of its memory that may be used, `weights` and `beside` (work on a prompt, buffers) what of it isn't
    for caches, `each` what it caches for one request of `context` tokens, of which the share `host_kv` lies with the
    host. `requests` is how many a group of tp · pp cards holds.
    """

    spec: ModelSpec
    layout: Layout
    card: CardSpec
    context: int
    kv_dtype: str
    room: int
    weights: int
    beside: int
    each: int
    host_kv: float
    requests: int

    @property
    def free(self) -> int:
        """Bytes of a card that are left for caches; below 0 where the rest does not fit."""
        return self.room - self.weights - self.beside

    @property
    def total(self) -> int:
        """Requests on all cards of the layout: each data rank has its own."""
        return self.requests * self.layout.dp

    @property
    def tokens(self) -> int:
        """Tokens that a group caches, all its requests together."""
        return self.requests * self.context

    @property
    def longest(self) -> int:
        """Tokens of the longest request that fits alone, prompt and answer: a longer one has to be refused."""
        here, few, many = 1 - self.host_kv, 0, self.spec.max_positions
        while few < many:
            half = (few + many + 1) // 2
            each = kv_cache(self.spec, half, unspread(self.layout), self.kv_dtype) * self._layers
            few, many = (half, many) if each * here <= self.free else (few, half - 1)
        return few

    @property
    def group(self) -> int:
        """Cards that share one request's cache."""
        return self.layout.tp * self.layout.pp

    @property
    def whole(self) -> int:
        """Bytes that all cards of a group cache for one request, copies of KV heads and latents included."""
        return sum(_cached(self.spec, self.layout, place, self.context, self.kv_dtype) * self.layout.tp
                   for place in places(self.spec, self.layout))

    @property
    def _layers(self) -> float:
        """The part of the layers that are on the card that is full first."""
        return self.each / kv_cache(self.spec, self.context, unspread(self.layout), self.kv_dtype)

    @property
    def binds(self) -> str:
        """What leaves no room for more: "weights", "work" or "cache"."""
        return "weights" if self.weights > self.room else "work" if self.free <= 0 else "cache"

    def fetched(self, link: LinkSpec | None = None) -> float:
        """Seconds in which the part of the caches that lies with the host comes to a full card, for each step. `link`
        is the card's own to its host if None. Raises ValueError where that isn't known."""
        return self.requests * self.each * self.host_kv / host_link(self.card, link).per_direction

    @property
    def title(self) -> str:
        return (f"{self.spec.name}, {self.layout.degrees}, requests of {self.context:,} tokens at once on "
                f"{self.card.name}s of {decimal(self.room)}")

    @property
    def rows(self) -> list[Row]:
        there = f"{self.kv_dtype}, a card's part of {decimal(self.whole)} on {self.group} card{'s' * (self.group > 1)}"
        away = f", of which {1 - self.host_kv:.0%} here" if self.host_kv else ""
        copies = f" on each of {self.layout.dp} data ranks" if self.layout.dp > 1 else ""
        rows = [Row("room", "of a card's memory, what may be used", self.room),
                Row("weights", "on the card that is full first", self.weights),
                Row("work and buffers", "a pass over prompts, and what is set aside", self.beside)]
        if self.free > 0:
            rows.append(Row("for caches", "room − weights − work and buffers", self.free))
        else:
            rows.append(Row("missing", "weights + work and buffers − room", -self.free))
        rows.append(Row("a request", there + away, self.each))
        if self.requests:
            rows.append(Row("requests", f"for caches ÷ a request{copies}", self.total, "at once"))
        return rows

    @property
    def footnotes(self) -> list[str]:
        if self.requests:
            return []
        most = f"; the longest request that does has {self.longest:,} tokens" if self.longest else ""
        return [f"Does not fit: the {self.binds} bind{'s' * (self.binds != 'weights')}{most}."]

    def to_dict(self) -> dict[str, Any]:
        """The account as plain data: inputs, bytes of a card, requests, rows."""
        inputs = {"model": self.spec.name, "card": self.card.name, **asdict(self.layout), "context": self.context,
                  "kv_dtype": self.kv_dtype, "host_kv": self.host_kv}
        kinds = ("room", "weights", "beside", "free", "each", "whole", "requests", "total", "binds")
        return {**inputs, **{kind: getattr(self, kind) for kind in kinds}, **super().to_dict()}


def concurrency(spec: ModelSpec, card: CardSpec, layout: Layout | None = None, *, context: int, dtype: str = "bf16",
                kv_dtype: str = "bf16", chunk: int = 2048, host_kv: float = 0.0, share: float = 1.0,
                reserve: str = RESERVE, redundant: int = 0) -> Concurrency:
    """How many requests of `context` tokens, prompt and answer, the cards hold at once; the bill is `serving`'s.

    `share` is the part of the memory that may be used (vLLM's gpu_memory_utilization). With a pipeline each card caches
    its own layers for every request; activations are then counted as if it had them all, which is a bound from above.
    Raises ValueError as `serving` does, on a share that is none, and on a pipeline whose layers don't all cache alike.
    """
    layout, share = layout_of(layout), number("share", share)
    if share > 1:
        raise ValueError(f"share = {share} is a part of the card's memory: 1 at most")
    served(unspread(layout)).check(spec)
    layout.check(spec, redundant)
    room, found = int(share * card.memory), []
    for place in places(spec, layout):
        def beside(requests: int, place: Place = place) -> tuple[int, int]:
            return _beside(spec, layout, place, context, requests, dtype, kv_dtype, chunk, host_kv, reserve,
                           redundant)

        each = _cached(spec, layout, place, whole("context", context), kv_dtype)
        here = each - round(each * host_kv)
        fit, most = 0, max(0, room - sum(beside(1))) // max(1, here)
        while fit < most:  # the more requests, the more logits beside their caches: halved
            half = (fit + most + 1) // 2
            fit, most = (half, most) if sum(beside(half)) + half * here <= room else (fit, half - 1)
        found.append((fit, Concurrency(spec, layout, card, context, kv_dtype, room, *beside(max(1, fit)), each, host_kv,
                                       fit)))
    return min(found, key=lambda pair: (pair[0], pair[1].free))[1]


def host_link(card: CardSpec, link: LinkSpec | None = None) -> LinkSpec:
    """`link`, or the card's own to its host. Raises ValueError where that isn't known."""
    if link is None and card.host_link is None:
        raise ValueError(f"{card.name} names no link to its host: give one, link=find_link(\"pcie5\")")
    return link or find_link(str(card.host_link))


def _beside(spec: ModelSpec, layout: Layout, place: Place, context: int, requests: int, dtype: str, kv_dtype: str,
            chunk: int, host_kv: float, reserve: str, redundant: int) -> tuple[int, int]:
    """Bytes of weights on a card of that place, and of what else is no cache."""
    if layout.pp == 1:
        bill = serving(spec, layout, context=context, concurrency=requests, dtype=dtype, kv_dtype=kv_dtype, chunk=chunk,
                       host_kv=host_kv, reserve=reserve, redundant=redundant)
        return bill.weights, bill.per_rank - bill.weights - bill.part("KV cache")
    bill = memory(spec, layout, dtype, rank=rank_at(layout, place.number, 0), redundant=redundant)
    tokens = min(whole("chunk", chunk), requests * context)
    work = forward_peak(spec, alone(layout), tokens=tokens, sequences=requests, dtype=bill.format.rest.name,
                        logits=requests, device="cuda")
    return bill.weights, work + reserved(reserve).nbytes


def _cached(spec: ModelSpec, layout: Layout, place: Place, context: int, kv_dtype: str) -> int:
    """Bytes that a card of that place caches for one request: of its own layers."""
    everything = kv_cache(spec, context, unspread(layout), kv_dtype)
    if layout.pp == 1:
        return everything
    if spec.compressed or spec.windowed_layers:
        raise ValueError(f"pp = {layout.pp}: the layers of {spec.name} don't all cache alike, and which of them a "
                         "stage has is not known here: leave pp out")
    return everything // spec.layers * sum(len(stage.layers) for stage in place.stages)


@dataclass(frozen=True)
class Preempted:
    """Seconds until a request that had to give up its cache has it again: `swap` is both ways over the host's link,
    `recompute` its tokens computed once more; `nbytes` is what each card moves each way."""

    nbytes: int
    swap: float
    recompute: float

    @property
    def cheaper(self) -> str:
        """"swap" or "recompute"."""
        return "swap" if self.swap < self.recompute else "recompute"


def preempted(spec: ModelSpec, card: CardSpec, layout: Layout | None = None, *, tokens: int, recompute: float,
              kv_dtype: str = "bf16", link: LinkSpec | None = None, block: int | None = None) -> Preempted:
    """Swap to the host, or compute again? For a request of `tokens` tokens whose prefill takes `recompute` seconds.

    In one piece the host's link moves a cache in far less time than it took to make. In pages it does not: with
    `block`, each page of so many tokens is, in each layer, a copy of its own, which costs the link's α both ways
    (vLLM, arXiv:2309.06180, §7.3, found swapping slower with small blocks for that reason). Raises ValueError as
    `kv_cache` does, and where the link isn't known.
    """
    layout, over = layout_of(layout), host_link(card, link)
    nbytes = max(_cached(spec, layout, place, whole("tokens", tokens), kv_dtype) for place in places(spec, layout))
    pieces = 1 if block is None else -(-tokens // whole("block", block)) * spec.layers
    way = nbytes / over.per_direction + pieces * (over.alpha or 0.0)
    return Preempted(nbytes, 2 * way, number("recompute", recompute))
