"""The ladder for serving: what to try, in which order, before a model is cut to be served, and then the cut."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from ..specs import CardSpec, Layout, ModelSpec, find_link, format_of
from ..specs.check import number, whole
from ..specs.units import decimal, seconds
from .kv import requests_that_fit
from .memory import MemoryBill, memory
from .serving import serving
from .step import Step, bigger, none_bigger, tensor_degrees
from .time import decode_floor, experts_met
from .training import RESERVE


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Requests to be served at once: `concurrency` of them, each up to `context` tokens, prompt and answer.

    `dtype` is the weights' format, by default the one they are published in (bf16 where that isn't known), `kv_dtype`
    that of the cache. A request waits `latency` seconds for a token at most; `rate` is the tokens a second that all of
    them together ask for, where it is known. Raises ValueError on sizes, times and rates that are not
    above 0.
    """

    context: int = 8192
    concurrency: int = 1
    dtype: str | None = None
    kv_dtype: str = "bf16"
    latency: float = 0.1
    rate: float | None = None
    reserve: str = RESERVE

    def __post_init__(self):
        whole("context", self.context)
        whole("concurrency", self.concurrency)
        number("latency", self.latency)
        if self.rate is not None:
            number("rate", self.rate)


WHOLE = Layout()


@dataclass(frozen=True)
class _Try:
    """One way to serve the task: on `card`s, cut by `layout`, stored as `dtype` and `kv_dtype`."""

    spec: ModelSpec
    task: Serve
    card: CardSpec
    dtype: str
    kv_dtype: str
    layout: Layout = WHOLE
    cards: int = 1

    @property
    def bill(self) -> MemoryBill:
        return serving(self.spec, self.layout, context=self.task.context, concurrency=self.task.concurrency,
                       dtype=self.dtype, kv_dtype=self.kv_dtype, reserve=self.task.reserve)

    @property
    def stored(self) -> str:
        """How weights and cache are stored, in words."""
        return self.dtype + (f", {self.kv_dtype} cache" if self.kv_dtype != self.task.kv_dtype else "")

    @property
    def floor(self) -> float:
        """Seconds that a token takes at least."""
        return decode_floor(self.spec, self.card, self.layout, batch=self.task.concurrency, context=self.task.context,
                            dtype=self.dtype, kv_dtype=self.kv_dtype)

    def step(self, name: str, yes: Literal["yes", "would"] = "yes", more: str = "") -> Step:
        """The rung: what it holds and how fast it can be, or the number that rules it out. `yes` is said if it does.

        Requests that don't fit on one copy of the model are shared out over as few copies as hold them, or over all
        that there are cards for, where a token would take too long with few.
        """
        groups = self.cards // self.layout.world_size
        least = self.copies(groups)
        if least is None:
            bill = self.bill
            return Step(name, "no", bill.per_rank, self.binding(bill), bill)
        step = self.over(least, name, yes, more)
        most = min(groups, self.task.concurrency)
        return step if step.does != "no" or least == most else self.over(most, name, yes, more)

    def copies(self, groups: int) -> int | None:
        """The fewest copies of the model that hold all requests, out of `groups`; None where they don't."""
        return next((n for n in range(1, min(groups, self.task.concurrency) + 1)
                     if self.share(n).bill.per_rank <= self.card.memory), None)

    def share(self, copies: int) -> _Try:
        """What one of so many copies serves."""
        return replace(self, task=replace(self.task, concurrency=-(-self.task.concurrency // copies)))

    def over(self, copies: int, name: str, yes: Literal["yes", "would"], more: str) -> Step:
        """The rung with its requests over so many copies, each of them on cards of its own: do they keep the times?"""
        one, task = self.share(copies), self.task
        bill, floor = one.bill, one.floor
        makes = task.concurrency / floor
        if floor > task.latency:
            return Step(name, "no", bill.per_rank, f"fits, but a token takes {seconds(floor)} at least, and may take "
                        f"{seconds(task.latency)}", bill)
        if task.rate and task.rate > makes:
            return Step(name, "no", bill.per_rank, f"fits, but with {_requests(task.concurrency)} at once it makes "
                        f"{makes:,.0f} tokens/s at most, of the {task.rate:,.0f} asked for", bill)
        why = (f"{copies} copies, with {_requests(one.task.concurrency)} each: " if copies > 1 else "") + (
            f"{decimal(bill.per_rank)} of {decimal(self.card.memory)} on each card, a token in {seconds(floor)} or more"
            f"{more}")
        if task.rate:
            why += f"; up to {makes:,.0f} tokens/s, of which {task.rate:,.0f} are asked for"
        return Step(name, yes, bill.per_rank, why, bill, copies * self.layout.world_size)

    def binding(self, bill: MemoryBill) -> str:
        """What doesn't fit: the weights, or the cache beside them, and then how many requests would."""
        cache, room = bill.part("KV cache"), self.card.memory
        beside = bill.per_rank - cache
        if bill.weights > room:
            return f"does not fit: {decimal(bill.weights)} of weights alone in {decimal(room)}: the weights bind"
        fit = requests_that_fit(room - beside, self.spec, self.task.context, self.layout, self.kv_dtype)
        if not fit:
            left = (f"leaves {decimal(room - beside)}, less than one request's cache" if room > beside
                    else f"is more than {decimal(room)}, before any request")
            return f"does not fit: {decimal(beside)} of weights and work {left}"
        return (f"{fit} of {self.task.concurrency} requests fit beside {decimal(beside)} of weights and work: the "
                "cache binds")


def _requests(n: int) -> str:
    return f"{n} request{'s' if n > 1 else ''}"


def serve_rungs(spec: ModelSpec, card: CardSpec, task: Serve, cards: int) -> Iterator[Step]:
    """The rungs in order, without an end: the caller stops at the first that does."""
    stored = format_of(task.dtype or spec.stored or "bf16").name
    plain = _Try(spec, task, card, stored, task.kv_dtype, cards=cards)
    yield plain.step(f"one card, {stored}")
    yield from _fewer_bits(plain)
    if plain.bill.per_rank > card.memory:
        yield _offload(plain)
    yield _bigger_card(plain)
    yield from _cut(plain)


def _fewer_bits(plain: _Try) -> Iterator[Step]:
    """Formats of 8, then of 4 bits that are smaller than what there is, each with the cache as it is, then in fp8.

    Eight bits rarely cost quality; four may, so that rung says "would".
    """
    for dtype in (_eight(plain.card), "int4"):
        if memory(plain.spec, dtype=dtype).weights >= memory(plain.spec, dtype=plain.dtype).weights:
            continue
        wide = next((wide for wide in ("bf16", "fp16", "fp32") if wide in plain.card.flops), "bf16")
        gain = "prefill gains too, the card computes in fp8" if dtype == "fp8" else f"prefill still computes in {wide}"
        for kv_dtype in dict.fromkeys((plain.kv_dtype, "fp8")):
            way = replace(plain, dtype=dtype, kv_dtype=kv_dtype)
            step = way.step(f"fewer bits, {way.stored}", "would" if dtype == "int4" else "yes",
                            f"; decoding reads less, {gain}; measure the error first")
            if step.does != "no":
                break
        yield step


def _eight(card: CardSpec) -> str:
    """The format of 8 bits for a card: fp8 where it computes in it."""
    return "fp8" if "fp8" in card.flops else "int8"


def _offload(plain: _Try) -> Step:
    """What the card has no room for stays with the host, and what a step needs of it is streamed for each, through
    rooms for two layers: one is computed from while the next arrives."""
    bill, card = plain.bill, plain.card
    excess = bill.per_rank + 2 * bill.weights // plain.spec.layers - card.memory
    if card.host_link is None or excess > bill.weights:
        why = (f"{decimal(card.memory - bill.weights + excess)} of caches, work and rooms for two layers are too much"
               if excess > bill.weights else "its link to the host isn't known")
        return Step("offload", "no", card.memory, why, bill)
    link = find_link(card.host_link)
    unmet = bill.stored["experts"] * (1 - experts_met(plain.spec, plain.task.concurrency))
    wait = max(plain.floor, excess * (1 - unmet / bill.weights) / link.per_direction)
    slower = plain.task.latency < wait
    why = (f"{decimal(excess)} stay with the host; over {link.name}, {decimal(link.per_direction)}/s, a token waits "
           f"{seconds(wait)}" + (f", and may take {seconds(plain.task.latency)}" if slower else ""))
    return Step("offload", "no" if slower else "yes", card.memory, why, bill)


def _bigger_card(plain: _Try) -> Step:
    """The smallest card that does it alone. It sends nothing, so it comes before the cut."""
    for other in bigger(plain.card):
        if plain.dtype == "fp8" and "fp8" not in other.flops:
            continue
        step = replace(plain, card=other, cards=1).step(f"a bigger card, {other.name}", "would", ", and no collective")
        if step.does == "would":
            return step
    return none_bigger(plain.card, plain.bill.per_rank)


def _cut(plain: _Try) -> Iterator[Step]:
    """Tensor parallelism inside a domain, as it is, then in fewer bits; beyond it, what division says until the bills
    of later chapters do."""
    spec, card, cards = plain.spec, plain.card, plain.cards
    first = (f"; the experts, {spec.parameters['experts'] / spec.total:.0%} of the weights, are the first axis "
             "(chapter 7)") if spec.experts else ""
    ways = (plain, replace(plain, kv_dtype="fp8"), replace(plain, dtype=_eight(card), kv_dtype="fp8"))
    for way in dict.fromkeys(ways):
        step = None
        for tp in tensor_degrees(spec, card, cards):
            step = replace(way, layout=Layout(tp)).step(f"cut, tensor parallel over {tp}, {way.stored}", more=first)
            if step.does == "yes":
                break
        if step:
            yield step
    yield _further(plain)


def _further(plain: _Try) -> Step:
    bill, card, cards = plain.bill, plain.card, plain.cards
    shared = bill.weights + bill.part("KV cache")
    each = card.memory - bill.part("activations") - bill.part("buffers")
    axis = ("experts first (chapter 7)" if plain.spec.experts
            else "tensor inside a domain, pipeline across (chapters 5, 6)")
    if each * cards < shared:
        needed = f"{math.ceil(shared / each)} cards or more" if each > 0 else "cards with room for the work on a prompt"
        why = f"{decimal(shared)} of weights and caches ask for {needed}: {axis}"
        return Step("cut further", "no", shared // cards, why)
    return Step("cut further", "would", shared // cards,
                f"{decimal(shared // cards)} of weights and caches a card if they divide evenly: {axis}")
