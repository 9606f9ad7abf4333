"""What to try, in which order, when a model meets a card: as it is, fewer bits, offload, a bigger card, then the cut.

Each rung is a bill and a floor of time, and carries the number that decided it. "One card is enough" is an answer, and
so is "it fits, and is too slow".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..specs import CardSpec, Layout, ModelSpec
from ..specs.check import whole
from ..specs.units import decimal
from .bill import Bill, Row
from .memory_bill import MemoryBill
from .serve_rungs import serve_rungs
from .serve_way import Serve
from .step import Step
from .train_rungs import Train, train_rungs


@dataclass(frozen=True, repr=False, eq=False)
class Plan(Bill):
    """The rungs that were tried, in order, up to the first that does what was asked."""

    headings = ("step", "why", "a card holds", "", "does it?")

    spec: ModelSpec
    card: CardSpec
    cards: int
    task: Serve | Train
    steps: tuple[Step, ...]

    @property
    def chosen(self) -> Step | None:
        """The rung to stand on: the first that does, else the first that would; None if none does."""
        for does in ("yes", "would"):
            if found := next((step for step in self.steps if step.does == does), None):
                return found
        return None

    @property
    def bill(self) -> MemoryBill | None:
        """What each card then holds; None where no bill has it yet."""
        return self.chosen.bill if self.chosen else None

    @property
    def headline(self) -> str:
        """The answer in a few words."""
        if self.chosen is None:
            return f"{self.cards} × {self.card.name} will not do"
        enough = self.chosen is self.steps[0] and self.chosen.cards == 1
        return "one card is enough" if enough else self.chosen.name

    @property
    def answer(self) -> str:
        """The answer in a sentence, with its reason."""
        return f"{self.headline}: {(self.chosen or self.steps[-1]).why}"

    @property
    def title(self) -> str:
        what = "serve" if isinstance(self.task, Serve) else "train"
        return (f"{self.spec.name}, {what} on {self.cards} × {self.card.name} of {decimal(self.card.memory)} "
                f"({self.card.memory_is})")

    @property
    def rows(self) -> list[Row]:
        return [Row(step.name, step.why, step.nbytes, note=step.does) for step in self.steps]

    @property
    def footnotes(self) -> list[str]:
        tokens = self.task.context if isinstance(self.task, Serve) else self.task.seq
        made_for = self.spec.max_positions
        beyond = [f"{tokens:,} tokens are more than the {made_for:,} that {self.spec.name} was made for."]
        return (beyond if tokens > made_for else []) + [f"Answer: {self.headline}."]

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data: inputs, parameter counts, steps, answer, the bill that was chosen."""
        task = {"goal": "serve" if isinstance(self.task, Serve) else "train", **vars(self.task)}
        steps = [{key: value for key, value in step._asdict().items() if key != "bill"} for step in self.steps]
        return {"model": self.spec.name, "card": self.card.name, "memory": self.card.memory, "cards": self.cards,
                **task, "parameters": {"resident": self.spec.total, "active": self.spec.active}, "steps": steps,
                "answer": self.answer, "bill": self.bill.to_dict() if self.bill else None, **super().to_dict()}


def ladder(spec: ModelSpec, card: CardSpec, task: Serve | Train, cards: int = 1) -> Plan:
    """What to do with `spec` on `cards` of `card`: rung by rung, each with the number that decided it.

    Serving: as it is on one card → fewer bits → weights streamed from the host → a bigger card → tensor parallelism
    inside a domain → further cards. Training: as it is → recomputation → optimizer states on the host → a bigger card →
    ZeRO over the data axis → tensor parallelism beside it. A bigger card comes before the cut because one card sends
    nothing; with `cards` at hand it is named, and the cut made. Raises ValueError on 0 cards and as the bills do.
    """
    whole("cards", cards)
    Layout().check(spec)
    if not isinstance(card, CardSpec):
        raise TypeError(f"a CardSpec is wanted, not {card!r}: find_card('h100') gives a bundled one")
    rungs = serve_rungs(spec, card, task, cards) if isinstance(task, Serve) else train_rungs(spec, card, task, cards)
    steps = []
    for step in rungs:
        steps.append(step)
        if step.does == "yes":
            break
    return Plan(spec, card, cards, task, tuple(steps))
