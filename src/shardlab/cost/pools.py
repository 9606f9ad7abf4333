"""Two roles and their cards: how many instances each takes, in which ratio, and what a token costs.

Input tokens are paid for by the cards that compute prompts, output tokens by those that make them: either rate divided
by all cards is too low, and says nothing about a card.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

from ..specs import Layout
from ..specs.check import number, whole
from .bill import Bill, Row

DAY = 86_400  # seconds


@dataclass(frozen=True)
class Role:
    """What one role is asked for: `asked` tokens a second, where an instance of `cards` cards makes `each` of them."""

    asked: float
    each: float
    cards: int

    def __post_init__(self):
        number("asked", self.asked)
        number("each", self.each)
        whole("cards", self.cards)

    @classmethod
    def of(cls, asked: float, each: float, layout: Layout) -> Role:
        """With instances of that layout: tp · pp · cp · dp cards each. Expert parallelism lies over cards that are
        there already, and adds none."""
        return cls(asked, each, layout.world_size)

    @property
    def instances(self) -> float:
        """How many are busy on average."""
        return self.asked / self.each

    @property
    def per_card(self) -> float:
        """Tokens a second of one card of this role."""
        return self.each / self.cards


@dataclass(frozen=True, repr=False, eq=False)
class Pools(Bill):
    """Prefill and decode, where a card costs `price` an hour. Of the input tokens the share `hits` is found in caches:
    they are asked for and not computed; whether `prefill.each` counts them is for whoever measured it to say."""

    prefill: Role
    decode: Role
    price: float = 2.0
    hits: float = 0.0

    def __post_init__(self):
        number("price", self.price)
        if not 0 <= self.hits < 1:
            raise ValueError(f"hits = {self.hits} is a share of the input: 0 to less than 1")

    @property
    def ratio(self) -> float:
        """Instances of prefill for each of decode."""
        return self.prefill.instances / self.decode.instances

    @property
    def cards(self) -> float:
        """Busy cards of both."""
        return sum(role.instances * role.cards for role in (self.prefill, self.decode))

    @property
    def per_day(self) -> float:
        """What the busy cards cost a day."""
        return self.cards * self.price * 24

    def per_million(self, what: str) -> float:
        """What a million tokens cost: "in" (hits among them), "uncached", "out", or "total", in and out together.
        Raises ValueError on another name."""
        into = self.prefill.asked
        each = {"in": (self.prefill, into), "uncached": (self.prefill, into * (1 - self.hits)),
                "out": (self.decode, self.decode.asked)}
        if what == "total":
            return self.per_day / DAY / (self.prefill.asked + self.decode.asked) * 1e6
        if what not in each:
            raise ValueError(f"{what!r} is none of in, uncached, out, total")
        role, tokens = each[what]
        return role.instances * role.cards * self.price / 3600 / tokens * 1e6

    @property
    def title(self) -> str:
        return (f"{self.prefill.asked:,.0f} tokens/s in and {self.decode.asked:,.0f} out, {self.price:g} an hour for a "
                "card")

    @property
    def rows(self) -> list[Row]:
        rows = [Row(name, f"{role.asked:,.0f} tokens/s {what} ÷ {role.each:,.0f} of {role.cards} cards",
                    round(role.instances, 2), "instances", f"at least {ceil(role.instances)}; a card makes "
                    f"{role.per_card:,.0f} tokens/s {what}")
                for name, role, what in (("prefill", self.prefill, "in"), ("decode", self.decode, "out"))]
        rows.append(Row("prefill : decode", "instances", round(self.ratio, 3), ": 1"))
        rows += [Row(f"a million {what}", text, round(self.per_million(what), 4), "") for what, text in (
            ("in", "prefill's cards, hits counted"), ("out", "decode's cards"), ("total", "all cards, in and out"))]
        return [*rows, Row("a day", f"{self.cards:,.1f} cards", round(self.per_day, 2), "")]

    def to_dict(self) -> dict[str, Any]:
        """The account as plain data: instances, cards, ratio, prices, rows."""
        return {"prefill": self.prefill.instances, "decode": self.decode.instances, "ratio": self.ratio,
                "cards": self.cards, "per_day": self.per_day,
                "per_million": {what: self.per_million(what) for what in ("in", "uncached", "out", "total")},
                **super().to_dict()}


def balance(prefill: float, answer: int, tpot: float, batch: float) -> float:
    """Instances of prefill for each of decode that keep both as busy: a request takes one `prefill` seconds, and the
    other `answer` tokens, each of them `tpot` seconds of which a batch of `batch` shares the cost: S_p ÷ (O · TPOT(B) /
    B). Raises ValueError on numbers that are not above 0."""
    return number("prefill", prefill) / (whole("answer", answer) * number("tpot", tpot) / number("batch", batch))
