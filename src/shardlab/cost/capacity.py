"""How many cards: what a load takes of them, layout by layout, and what its tokens then cost.

Three numbers decide, and each depends on the others: requests a second, seconds a request takes, requests at once. A
layout is priced at the batch where they agree, as many copies of it are counted as the load takes, and the fewest cards
win. One pool or two, and one card or more, are asked last, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from ..specs import CardSpec, ClusterSpec, Layout, LinkSpec, ModelSpec, find_link
from ..specs.check import number, whole
from ..specs.layout_check import divisors
from ..specs.units import decimal, seconds
from .bill import Bill, Row
from .concurrency import Concurrency, concurrency
from .handover import handover
from .load import Load
from .serve_rates import Rate, colocated, colocated_at
from .serve_step import ServeStep, serve_step
from .step import tensor_degrees
from .step_time_speeds import Speeds
from .training import RESERVE
from .why_not import Split, Verdict, alone, why_not, why_not_split


@dataclass(frozen=True, eq=False)
class Option:
    """One layout: what it holds, how long a request takes that is alone on it (`ttft`, `tpot`), and the most requests a
    second that keep their times, on each data rank. `copies` of it take the load; 0 where no number of them does."""

    layout: Layout
    room: Concurrency
    step: ServeStep
    rate: Rate
    ttft: float
    tpot: float
    copies: int

    @property
    def cards(self) -> int:
        """Of all copies."""
        return self.copies * self.layout.world_size

    @property
    def per_card(self) -> float:
        """Requests a second of one card, in time."""
        return self.rate.rate * self.layout.dp / self.layout.world_size


@dataclass(frozen=True, repr=False, eq=False)
class Capacity(Bill):
    """The layouts of a model that hold it, the one first that takes the load with the fewest cards.

    `refused` are the layouts that hold no request. `one_card` says whether more than one card is needed, `split`
    whether prompts and answers should have cards of their own; None where nothing takes the load.
    """

    headings = ("layout", "what it does", "cards for the load", "", "")

    spec: ModelSpec
    card: CardSpec
    cards: int
    load: Load
    price: float
    options: tuple[Option, ...]
    refused: tuple[Concurrency, ...]
    one_card: Verdict
    split: Split | None

    @property
    def chosen(self) -> Option | None:
        """The first; None where no layout takes the load, with any number of copies."""
        return self.options[0] if self.options and self.options[0].copies else None

    @property
    def enough(self) -> bool:
        """Whether the cards that there are do."""
        return self.chosen is not None and self.chosen.cards <= self.cards

    @property
    def at(self) -> Rate | None:
        """What the chosen layout's data ranks do at the load: batch, seconds to a first and a further token."""
        if (one := self.chosen) is None:
            return None
        each = self.load.rate / (one.copies * one.layout.dp)
        return colocated_at(each, one.step, self.load, one.room.requests, one.rate.budget, one.layout.pp)

    @property
    def per_million(self) -> dict[str, float]:
        """What a million tokens cost on the chosen cards, busy or not: "out", where answers pay for all of it; "total",
        in and out together."""
        if (one := self.chosen) is None:
            return {}
        second = one.cards * self.price / 3600
        return {"out": second / (self.load.rate * self.load.answer) * 1e6,
                "total": second / (self.load.rate * (self.load.prompt + self.load.answer)) * 1e6}

    @property
    def answer(self) -> str:
        """In a sentence: how many cards, cut how; or what no number of copies changes."""
        if (one := self.chosen) is None:
            return self._hopeless()
        copies = f"{one.copies} copies of {one.layout.degrees}" if one.copies > 1 else one.layout.degrees
        missing = "" if self.enough else f", {one.cards - self.cards} more than there are"
        return f"{one.cards} × {self.card.name}{missing}: {copies}"

    @property
    def title(self) -> str:
        load = self.load
        return (f"{self.spec.name}, {load.rate:g} requests/s of {load.prompt:,} + {load.answer:,} tokens on "
                f"{self.card.name}s")

    @property
    def rows(self) -> list[Row]:
        return [Row(one.layout.degrees, f"holds {one.room.total:,} at once; {one.rate.rate * one.layout.dp:.3g} "
                    f"requests/s in time, {one.per_card:.3g} a card; a request alone: first token {seconds(one.ttft)}, "
                    f"a further one {seconds(one.tpot)}", one.cards, "cards",
                    "" if one.copies else "no number of them: " + (
                        "a request alone takes too long" if self._slow(one) else "the times are missed together"))
                for one in self.options]

    @property
    def footnotes(self) -> list[str]:
        notes = [f"Answer: {self.answer}."]
        if self.at and self.chosen:
            notes.append(f"There {self.at.batch:.3g} requests at once on each data rank keep pace, with a first token "
                         f"in {seconds(self.at.ttft)} and a further one every {seconds(self.at.tpot)} on average "
                         f"({self.at.how}).")
            prices = " and ".join(f"{value:.3g} in all for a million tokens {what}" if what == "out" else
                                  f"{value:.3g} for a million in and out" for what, value in self.per_million.items())
            notes.append(f"At {self.price:g} an hour for a card: {prices}.")
        notes.append(f"More than one card? {self.one_card.sentence}.")
        if self.split:
            notes.append(f"One pool or two? {self.split.answer}. Two would balance at {self.split.ratio:.3g} instances "
                         "for prompts to each for answers.")
        speeds = self.options[0].step.speeds if self.options else Speeds()
        said = ", ".join(f"{name} {getattr(speeds, name):.3g} ({speeds.how(name)})"
                         for name in ("share", "memory", "links", "overhead"))
        return [*notes, f"Taken for granted: {said}; requests come at random, and all seconds are means. No run of "
                "ours is behind them."]

    def to_dict(self) -> dict[str, Any]:
        """The account as plain data: load, options, what was chosen, prices, verdicts, rows."""
        options = [{**asdict(one.layout), "degrees": one.layout.degrees, "requests": one.room.total,
                    "rate": one.rate.rate * one.layout.dp, "ttft": one.ttft, "tpot": one.tpot, "copies": one.copies,
                    "cards": one.cards} for one in self.options]
        return {"model": self.spec.name, "card": self.card.name, "there": self.cards, "load": asdict(self.load),
                "price": self.price, "answer": self.answer, "enough": self.enough, "options": options,
                "at": self.at._asdict() if self.at else None, "per_million": self.per_million,
                "one_card": {**self.one_card._asdict(), "sentence": self.one_card.sentence},
                "split": self.split.to_dict() if self.split else None, **super().to_dict()}

    def _slow(self, one: Option) -> bool:
        limits = ((one.ttft, self.load.ttft), (one.tpot, self.load.tpot))
        return any(limit is not None and value > limit for value, limit in limits)

    def _hopeless(self) -> str:
        if not self.options:
            near = max(self.refused, key=lambda room: (room.longest, room.free))
            most = (f"the longest that fits has {near.longest:,}" if near.longest else
                    f"{decimal(near.weights)} of weights alone, and a card has {decimal(near.room)}")
            return (f"no layout on {self.cards} × {self.card.name} holds a request of {self.load.longest:,} tokens: "
                    f"with {near.layout.degrees}, {most}")
        first, further = (min(self.options, key=lambda one: getattr(one, name)) for name in ("ttft", "tpot"))
        for best, name, limit in ((first, "ttft", self.load.ttft), (further, "tpot", self.load.tpot)):
            if limit is not None and (takes := getattr(best, name)) > limit:
                what = "a first token" if name == "ttft" else "a further token"
                return (f"no number of copies: {what} of a request alone takes {seconds(takes)} at best "
                        f"({best.layout.degrees}), and may take {seconds(limit)}: change the cut (tp), the bits or "
                        "the card")
        return "no number of copies keeps all the times together: give prompts smaller pieces, or cards of their own"


def capacity(spec: ModelSpec, card: CardSpec, load: Load, *, cards: int = 8, price: float = 2.0, dtype: str = "bf16",
             kv_dtype: str = "bf16", arithmetic: str = "bf16", speeds: Speeds | None = None,
             sync: float | None = None, reserve: str = RESERVE, between: LinkSpec | str = "ib-ndr",
             layouts: Iterable[Layout] | None = None, swing: float = 1.0) -> Capacity:
    """How many of `card` take the load, and cut how: of `layouts`, or of those that a serving engine would have on
    `cards` of them (`layouts_of`). A card costs `price` an hour. The rest as in `concurrency` and `serve_step`; `swing`
    is that of `why_not_split`. Raises ValueError as these do.
    """
    number("price", price)
    whole("cards", cards)
    link = between if isinstance(between, LinkSpec) else find_link(between)
    verdict = why_not(spec, card, load, dtype=dtype, kv_dtype=kv_dtype, arithmetic=arithmetic, speeds=speeds,
                      reserve=reserve)
    options, refused = [], []
    for layout in layouts if layouts is not None else layouts_of(spec, card, cards):
        room = concurrency(spec, card, layout, context=load.longest, dtype=dtype, kv_dtype=kv_dtype, reserve=reserve)
        if not room.requests:
            refused.append(room)
            continue
        n = layout.world_size
        step = serve_step(spec, layout, alone(card) if n == 1 else ClusterSpec.of(card, n, link), dtype=dtype,
                          kv_dtype=kv_dtype, arithmetic=arithmetic, speeds=speeds, sync=sync)
        rate = colocated(step, load, room.requests, layout.pp)
        copies = ceil(load.rate / (rate.rate * layout.dp)) if rate.rate else 0
        options.append(Option(layout, room, step, rate, step([(load.uncached, load.prompt)]),
                              step([(1, load.context)]), copies))
    options.sort(key=lambda one: (not one.copies, one.cards, -one.per_card))
    split = _split(spec, load, options[0], link, kv_dtype, swing) if options and options[0].copies else None
    return Capacity(spec, card, cards, load, price, tuple(options), tuple(refused), verdict, split)


def layouts_of(spec: ModelSpec, card: CardSpec, cards: int) -> Iterator[Layout]:
    """Those to try: whole; tensor parallel inside a domain, and over it where there are more cards, or a pipeline of
    such groups; of a mixture, attention on each card for itself and the experts over all."""
    yield Layout()
    inside = list(tensor_degrees(spec, card, cards))
    yield from map(Layout, inside)
    domains = [n for n in divisors(cards // card.domain) if n > 1] if cards >= 2 * card.domain else []
    for n in domains:
        if inside and not (spec.window or spec.compressed):
            yield Layout(inside[-1], pp=n)
        if not spec.experts:
            yield from (Layout(tp) for tp in _allowed(spec, card.domain * n))
    if spec.experts:
        sizes = {*range(2, min(cards, card.domain) + 1), *(card.domain * n for n in domains)}
        yield from (Layout(dp=n, ep=n) for n in sorted(sizes) if spec.experts.routed % n == 0)


def _allowed(spec: ModelSpec, tp: int) -> Iterator[int]:
    try:
        Layout(tp).check(spec)
    except ValueError:
        return
    yield tp


def _split(spec: ModelSpec, load: Load, one: Option, link: LinkSpec, kv_dtype: str, swing: float) -> Split:
    """One pool or two, of as many instances as the load takes: a group's cards send its cache over a port each."""
    group = Layout(one.layout.tp)
    moved = handover(spec, load.prompt, group, prefill=one.ttft, link=link, dtype=kv_dtype)
    return why_not_split(one.step, load, moved, instances=one.copies * one.layout.dp, most=one.room.requests,
                         swing=swing, flight=one.layout.pp)
