"""The planner for training: of all layouts of a model that fit on a cluster, those whose step takes least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from ..specs import ClusterSpec, Layout, ModelSpec
from ..specs.check import whole
from ..specs.units import count, decimal
from .bill import Bill, Row
from .planner_rules import RULES
from .planner_search import Candidate, Search, weights_for
from .planner_why import why
from .step_time import step_time
from .step_time_bill import StepTime
from .step_time_speeds import Speeds
from .training import RESERVE


@dataclass(frozen=True, eq=False)
class Choice:
    """A layout that fits, with micro-batches of `batch` sequences: `estimate` is about how many seconds its step takes,
    by the closed form that it was found with, `held` the bytes that a rank holds at most, a bound from above.

    `weights` are those of `specs.stages.split`, which `parallel.pipeline.cut` takes too.
    """

    layout: Layout
    batch: int
    recompute: str | None
    held: float
    estimate: float
    weights: tuple[float, ...] | None
    search: Search

    @cached_property
    def bill(self) -> StepTime:
        """The time of a step, of the very lists that run."""
        found = self.search
        return step_time(found.spec, self.layout, found.cluster, batch=self.batch, seq=found.seq, dtype=found.dtype,
                         arithmetic=found.arithmetic, handed=found.handed, recompute=self.recompute,
                         weights=self.weights, speeds=found.speeds)

    @property
    def name(self) -> str:
        """Its cuts, micro-batches and recomputation in words."""
        again = f", {self.recompute} recomputation" if self.recompute else ""
        times = self.layout.microbatches
        return f"{self.layout.degrees}; {times} micro-batch{'es' * (times > 1)} of {self.batch}{again}"


@dataclass(frozen=True, repr=False, eq=False)
class Planned(Bill):
    """The best layouts for steps of `tokens` tokens, in sequences of `seq`, the best first by their estimates."""

    headings = ("layout", "why", "a step", "", "MFU")

    spec: ModelSpec
    cluster: ClusterSpec
    tokens: int
    seq: int
    choices: tuple[Choice, ...]
    search: Search

    @property
    def best(self) -> Choice | None:
        """The first; None where nothing fits."""
        return self.choices[0] if self.choices else None

    def why(self, number: int) -> str:
        """A sentence on a choice: where the best one's time goes, or what another one pays for."""
        bill = self.choices[number].bill
        if number:
            return why(self.choices[0].bill, bill).sentence
        others = f"most of the rest is {bill.bottleneck}" if bill.bottleneck != "arithmetic" else "little else"
        return f"{100 * bill.parts['arithmetic'] / bill.seconds:.0f}% arithmetic; {others}"

    @property
    def title(self) -> str:
        return (f"{self.spec.name}, trained on {self.cluster.name} in steps of {count(self.tokens)} tokens, sequences "
                f"of {self.seq:,}: {self.search.fit:,} layouts fit")

    @property
    def rows(self) -> list[Row]:
        return [Row(choice.name, f"{self.why(i)}; bottleneck: {choice.bill.bottleneck}; a rank holds "
                    f"{decimal(choice.held, 4)} at most", round(choice.bill.seconds, 4), "s",
                    f"{100 * choice.bill.utilisation:.1f}%") for i, choice in enumerate(self.choices)]

    @property
    def footnotes(self) -> list[str]:
        speeds, room = self.search.speeds, self.cluster.card.memory
        said = ", ".join(f"{name} {getattr(speeds, name):.3g} ({speeds.how(name)})"
                         for name in ("share", "memory", "links", "overlap"))
        notes = [] if self.choices else [f"Nothing fits: {decimal(self.search.least)} on a rank at least, of "
                                         f"{decimal(room)}; more cards, or shorter sequences."]
        if any(choice.layout.kind == "dualpipe" for choice in self.choices):
            notes.append("DualPipe has each stage on two ranks; nothing here runs it.")
        return [*notes, f"Taken for granted: {said}.", "Left out: " + "; ".join(RULES) + "."]

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data: inputs, how many layouts fit, each choice with its bill, rows."""
        choices = [{**asdict(choice.layout), "batch": choice.batch, "recompute": choice.recompute, "held": choice.held,
                    "estimate": choice.estimate, "why": self.why(i), "bill": choice.bill.to_dict()}
                   for i, choice in enumerate(self.choices)]
        return {"model": self.spec.name, "cluster": self.cluster.name, "cards": self.cluster.cards,
                "tokens": self.tokens, "seq": self.seq, "fit": self.search.fit, "rules": list(RULES),
                "choices": choices, **super().to_dict()}


def plan_training(spec: ModelSpec, cluster: ClusterSpec, *, tokens: int, seq: int, dtype: str = "bf16",
                  arithmetic: str | None = None, handed: str | None = None,
                  modes: Sequence[str | None] = (None, "full"), optimizer: str = "adamw", share_experts: bool = False,
                  speeds: Speeds | None = None, reserve: str = RESERVE, few: int = 10) -> Planned:
    """The `few` best layouts of `spec` on all cards of `cluster`, for steps of `tokens` tokens in sequences of `seq`.

    Every layout is tried that the model and the cluster allow, but for those that `RULES` leave out (they stand in the
    plan). `modes` is what may be computed again, from nothing to most; "light" is what DeepSeek-V3 does, and only
    priced. `share_experts` shares out the optimizer's states of spread experts too, which `zero.shard` does not. The
    rest as in `step_time` and `training`.

    Raises ValueError on tokens that are no whole sequences, and as these do. Where nothing fits, the plan is empty and
    says how much is missing.
    """
    if whole("tokens", tokens) % whole("seq", seq):
        below = tokens // seq * seq
        raise ValueError(f"tokens = {tokens:,} are no whole sequences of {seq:,}: take {below or seq:,} or "
                         f"{below + seq:,}")
    Layout().check(spec)
    if spec.learned_positions and seq > spec.max_positions:
        raise ValueError(f"{spec.name} has learned {spec.max_positions:,} positions, too few for {seq:,} tokens")
    search = Search(spec, cluster, tokens // seq, seq, dtype, arithmetic or dtype, handed or dtype, speeds or Speeds(),
                    share_experts, tuple(modes), optimizer, reserve)
    found = sorted(search.candidates(), key=lambda one: one.seconds)[: whole("few", few)]
    return Planned(spec, cluster, tokens, seq, tuple(_choice(one, search) for one in found), search)


def _choice(one: Candidate, search: Search) -> Choice:
    weights = weights_for(search.spec, search.seq) if one.layout.stages > 1 else None
    return Choice(one.layout, one.batch, one.recompute, one.held, one.seconds, weights, search)
