"""One rung of the ladder, and what all rungs are made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from ..specs import CardSpec, Layout, ModelSpec, bundled_cards
from ..specs.units import decimal
from .memory_bill import MemoryBill


class Step(NamedTuple):
    """What was tried; whether it does what was asked: "yes", "no", or "would" (with another card, at another speed, or
    in a way that nothing here runs); bytes on each card; why; the bill; how many cards it takes."""

    name: str
    does: Literal["yes", "no", "would"]
    nbytes: int
    why: str
    bill: MemoryBill | None = None
    cards: int = 1


def bigger(card: CardSpec) -> Iterator[CardSpec]:
    """The bundled cards with more memory than this one, the smallest first; not those that are announced only, whose
    driver nobody has asked yet."""
    larger = [other for other in bundled_cards().values() if other.usable and other.memory > card.memory]
    yield from sorted(larger, key=lambda other: other.memory)


def none_bigger(card: CardSpec, nbytes: int) -> Step:
    """The rung where no card that is known here does it alone."""
    largest = max(bigger(card), key=lambda other: other.memory, default=card)
    return Step("a bigger card", "no", nbytes,
                f"none does it alone; the largest here is {largest.name} of {decimal(largest.memory)}")


def tensor_degrees(spec: ModelSpec, card: CardSpec, cards: int) -> Iterator[int]:
    """The tp that the model allows inside a domain, from 2 up; `cards` that are left over idle, or hold copies."""
    for tp in range(2, min(cards, card.domain) + 1):
        try:
            Layout(tp).check(spec)
        except ValueError:
            continue
        yield tp
