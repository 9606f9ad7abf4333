"""How long a schedule takes and how long its ranks stand idle: the very list that runs, with a time for each action.

Two ratios are called the bubble, and they are not the same number. With p equal stages and m micro-batches, GPipe and
1F1B are idle for p − 1 micro-batches' time on each rank and busy for m, so

    bubble over total = (p − 1) / (m + p − 1)       of all the time, how much is idle (GPipe, arXiv:1811.06965, §2.3)
    bubble over ideal = (p − 1) / m                 how much longer than with no idle time (arXiv:2104.04473, §2.2)

The first is never above 1; x of the second is x / (1 + x) of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite

from ..schedule import Action, Orders, Span, clock, peak_live, size
from ..specs.check import whole as whole_number
from .bill import Bill, Row


@dataclass(frozen=True)
class Times:
    """Seconds that a stage takes for a micro-batch: `forward`, and the two halves of backward, of its `input`s and of
    its `weight`s. `both` is how long a forward and a whole backward pass take that run at the same time, None where
    neither gains by it. Raises ValueError on a time below 0."""

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    both: float | None = field(default=None, kw_only=True)

    def __post_init__(self):
        for name in ("forward", "input", "weight", "both"):
            value = getattr(self, name)
            if value is not None and not (isfinite(value) and value >= 0):
                raise ValueError(f"{name} = {value}: a time is a number of seconds from 0")

    @property
    def backward(self) -> float:
        """Seconds of a whole backward pass."""
        return self.input + self.weight

    def of(self, kind: str) -> float:
        """Seconds of an action of the kind."""
        return {"F": self.forward, "B": self.backward, "I": self.input, "W": self.weight}[kind]


@dataclass(frozen=True, repr=False, eq=False)
class Timeline(Bill):
    """When each rank does what, in seconds from the first action. `spans` has each rank's, in order."""

    spans: list[list[Span]]
    stages: int
    microbatches: int
    live: list[int]

    @cached_property
    def total(self) -> float:
        """Seconds from the first action's start to the last one's end."""
        return max(span.end for mine in self.spans for span in mine)

    @cached_property
    def busy(self) -> list[float]:
        """Seconds that each rank computes. A pair runs at one time, and counts once."""
        return [sum(span.end - span.start for i, span in enumerate(mine) if not (i and mine[i - 1].action.paired))
                for mine in self.spans]

    @property
    def ideal(self) -> float:
        """Seconds that it would take if no rank were idle, and all did an equal part."""
        return sum(self.busy) / len(self.busy)

    @property
    def idle(self) -> float:
        """Seconds that a rank stands idle, on average."""
        return self.total - self.ideal

    @property
    def bubble_over_total(self) -> float:
        """Idle ÷ total: the share of the ranks' time in which they do nothing, 0 to 1."""
        return self.idle / self.total

    @property
    def bubble_over_ideal(self) -> float:
        """Idle ÷ ideal: how much longer it takes than it would without idle time."""
        return self.idle / self.ideal

    @property
    def title(self) -> str:
        return f"{len(self.spans)} ranks, {self.stages} stages, {self.microbatches} micro-batches"

    @property
    def rows(self) -> list[Row]:
        return [Row("total", "first start to last end", round(self.total, 6), "s"),
                Row("ideal", "what a rank computes, on average", round(self.ideal, 6), "s"),
                Row("idle", "total − ideal", round(self.idle, 6), "s"),
                Row("bubble over total", "idle ÷ total", round(100 * self.bubble_over_total, 2), "%"),
                Row("bubble over ideal", "idle ÷ ideal", round(100 * self.bubble_over_ideal, 2), "%"),
                Row("live at most", "(stage, micro-batch)es held for backward", max(self.live), "on a rank")]


def timeline(orders: Orders, times: Times | Sequence[Times] | None = None, hop: float = 0.0) -> Timeline:
    """The schedule in time. `times` is one for all stages, or one for each; by default forward takes 1 s, backward 2.
    What a rank hands to another one arrives `hop` seconds later, while both go on.

    Raises ValueError where the schedule can't be done (see `schedule.check`), on another number of times than stages,
    on a hop below 0, and where nothing takes any time.
    """
    stages, microbatches = size(orders)
    given = Times() if times is None else times
    each = [given] * stages if isinstance(given, Times) else list(given)
    if len(each) != stages:
        raise ValueError(f"{len(each)} times for {stages} stages: give one for each, or one for all")
    if not all(isinstance(one, Times) for one in each):
        raise TypeError(f"times must be Times, such as Times(forward=1, input=1, weight=1), not {times!r}")
    if not (isfinite(hop) and hop >= 0):
        raise ValueError(f"hop = {hop}: give seconds from 0")
    table = {(kind, stage): each[stage].of(kind) for stage in range(stages) for kind in "FBIW"}

    def both(first: Action, second: Action) -> float:
        gains = [each[action.stage].both for action in (first, second)]
        apart = sum(table[action[:2]] for action in (first, second))
        known = [gain for gain in gains if gain is not None]
        return sum(known) / len(known) if known else apart

    spans = clock(orders, lambda action: table[action[:2]], hop, both)
    line = Timeline(spans, stages, microbatches, peak_live(orders))
    if not line.ideal:
        raise ValueError("every action takes 0 s: of no time there are no shares")
    return line


def idle_by_formula(name: str, ranks: int, chunks: int = 1, times: Times | None = None) -> float:
    """Seconds that each rank stands idle, by the published formula: for equal stages, no hop cost, and at least as many
    micro-batches as ranks (two for each rank in DualPipe and DualPipeV). Times are of a stage.

    GPipe and 1F1B (arXiv:2104.04473, §2.1, §2.2.1), interleaved (§2.2.2): whatever the times. ZB-H1 (arXiv:2401.10241,
    §2.2): where weight ≤ forward and weight ≤ input; beyond, the list is idle for longer. DualPipe and DualPipeV (the
    table of github.com/deepseek-ai/DualPipe, which counts the ranks of DualPipeV as half the stages): where weight ≤
    input = forward and both ≥ backward; with a both that gains, it is of the ranks that run most in pairs. Raises
    ValueError on another name, below 1 rank, and on an odd number of them for DualPipe.
    """
    whole_number("ranks", ranks)
    if name == "dualpipe" and ranks % 2:
        raise ValueError(f"ranks = {ranks} is odd, and DualPipe's are in pairs")
    t = times or Times()
    whole = t.forward + t.backward
    both = whole if t.both is None else t.both
    formulas: dict[str, Callable[[], float]] = {
        "gpipe": lambda: (ranks - 1) * whole,
        "1f1b": lambda: (ranks - 1) * whole,
        "interleaved": lambda: (ranks - 1) * whole,  # of a stage: the model's ÷ (ranks · chunks)
        "zero_bubble": lambda: (ranks - 1) * (whole - 2 * t.weight),
        "dualpipe": lambda: (ranks / 2 - 1) * (both + t.backward - 3 * t.weight),
        "dualpipe_v": lambda: (ranks - 1) * (both + t.backward - 3 * t.weight),
    }
    if name not in formulas:
        raise ValueError(f"no formula for {name!r}; there is one for {', '.join(formulas)}")
    return formulas[name]()
