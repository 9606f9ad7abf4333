"""What is to be served, and one way to do it: does it fit, over how many copies, and does it keep the times?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ..specs import CardSpec, Layout, ModelSpec
from ..specs.check import number, whole
from ..specs.units import decimal, seconds
from .memory_bill import MemoryBill
from .serving import serving
from .step import Step
from .time import decode_floor
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
class Way:
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
            return Step(name, "no", bill.per_rank, self.binding(), bill)
        step = self.over(least, name, yes, more)
        most = min(groups, self.task.concurrency)
        return step if step.does != "no" or least == most else self.over(most, name, yes, more)

    def copies(self, groups: int) -> int | None:
        """The fewest copies of the model that hold all requests, out of `groups`; None where they don't.

        The more copies, the fewer requests on each: so the fewest are found by halving.
        """
        def hold(n: int) -> bool:
            return self.share(n).bill.per_rank <= self.card.memory

        few, many = 1, min(groups, self.task.concurrency)
        if many < 1 or not hold(many):
            return None
        while few < many:
            half = (few + many) // 2
            few, many = (few, half) if hold(half) else (half + 1, many)
        return many

    def share(self, copies: int) -> Way:
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

    def binding(self) -> str:
        """What doesn't fit: the weights, or the cache beside them, and then how many requests would."""
        room = self.card.memory
        fit, most = 0, self.task.concurrency - 1
        while fit < most:  # the more requests, the more bytes: halved
            half = (fit + most + 1) // 2
            fit, most = (half, most) if self.holding(half).per_rank <= room else (fit, half - 1)
        bill = self.holding(max(1, fit))
        beside = bill.per_rank - bill.part("KV cache")
        if bill.weights > room:
            return f"does not fit: {decimal(bill.weights)} of weights alone in {decimal(room)}: the weights bind"
        if not fit:
            left = (f"leaves {decimal(room - beside)}, less than one request's cache" if room > beside
                    else f"is more than {decimal(room)}, before any request")
            return f"does not fit: {decimal(beside)} of weights and work {left}"
        return (f"{fit} of {self.task.concurrency} requests fit beside {decimal(beside)} of weights and work: the "
                "cache binds")

    def holding(self, requests: int) -> MemoryBill:
        """What each card holds with so many requests at once."""
        return replace(self, task=replace(self.task, concurrency=requests)).bill


def _requests(n: int) -> str:
    return f"{n} request{'s' if n > 1 else ''}"
