"""Reasons against: against cutting a model that one card serves, and against two pools where one does.

Each verdict carries the number that decided it. More cards are for a model that does not fit, for more requests at once
than fit beside it, for more tokens a second than a card makes, and for a request that takes too long by itself. The
first and the last take a cut; for the others copies do, which send nothing to each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf
from typing import Any, Literal, NamedTuple

from ..specs import CardSpec, ClusterSpec, LinkSpec, ModelSpec
from ..specs.check import whole
from ..specs.units import decimal, seconds
from .bill import Bill, Row
from .concurrency import concurrency
from .handover import Handover, kv_handed
from .load import Load
from .queueing import MORE, StepSeconds
from .serve_rates import best_split, colocated, decode_pool, keeps_at, prefill_pool
from .serve_step import serve_step
from .step_time_speeds import Speeds
from .training import RESERVE

Aim = Literal["throughput", "latency"]
PORTS, FEW, OFF, SWING, SHORT = 2.0, 3, 0.2, 1.2, 512  # rules of thumb: see `why_not_split`


class Verdict(NamedTuple):
    """Whether to use more than one card, for which `reason`, `why` in numbers, and what to do then."""

    more: bool
    reason: str
    why: str
    remedy: str = ""

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        return f"{'yes' if self.more else 'no'}, {self.reason}: {self.why}" + f"; {self.remedy}" * bool(self.remedy)


def why_not(spec: ModelSpec, card: CardSpec, load: Load, *, aim: Aim | None = None, dtype: str = "bf16",
            kv_dtype: str = "bf16", arithmetic: str = "bf16", speeds: Speeds | None = None, reserve: str = RESERVE
            ) -> Verdict:
    """Does serving this load take more than one card? `aim` says what more of them are hoped to be for.

    No: "fits and fast enough", "traffic too low" (for throughput), "latency already met" (for latency). Yes: "does not
    fit"; "latency", one request alone takes too long, which copies don't change; "concurrency", more requests at once
    than memory has room for; "peak throughput", more than a card computes. Raises ValueError on another aim, on more
    tokens than the model was made for, and as `concurrency` and `serve_step` do.
    """
    if aim not in (None, "throughput", "latency"):
        raise ValueError(f"aim = {aim!r}: more cards are for 'throughput' or for 'latency', or say neither")
    load.within(spec)
    room = concurrency(spec, card, context=load.longest, dtype=dtype, kv_dtype=kv_dtype, reserve=reserve)
    if not room.requests:
        what = f"{decimal(room.weights)} of weights alone" if room.binds == "weights" else (
            f"{decimal(room.weights + room.beside + room.each)} with one request")
        return Verdict(True, "does not fit", f"{what}, and a card has {decimal(room.room)}",
                       "fewer bits, or the weights cut over cards")
    step = serve_step(spec, None, alone(card), dtype=dtype, kv_dtype=kv_dtype, arithmetic=arithmetic, speeds=speeds)
    first, further = step([(load.uncached, load.prompt)]), step([(1, load.context)])
    for name, takes, limit in (("a first token", first, load.ttft), ("a further one", further, load.tpot)):
        if limit is not None and takes > limit:
            return Verdict(True, "latency", f"of a request alone {name} takes {seconds(takes)}, and may take "
                           f"{seconds(limit)}", "copies do not shorten it: cut the layers (tp), store fewer bits, or "
                           "take a faster card")
    here = colocated(step, load, room.requests)
    if here.rate < load.rate:
        copies = ceil(load.rate / here.rate) if here.rate else None
        remedy = (f"{copies} copies do, which send nothing to each other" if copies else
                  "no number of copies keeps these times: cut the layers (tp), or take a faster card")
        asked = f"{load.rate:g} requests/s are asked for"
        if keeps_at(load.rate, step, load, MORE * room.requests):
            return Verdict(True, "concurrency", f"{room.requests:,} requests fit at once, and keep pace with "
                           f"{here.rate:.3g} a second; {asked}", remedy)
        return Verdict(True, "peak throughput", f"a card makes {here.rate:.3g} requests/s in time; {asked}", remedy)
    if aim == "throughput":
        return Verdict(False, "traffic too low", f"{load.rate:g} requests/s are {load.rate / here.rate:.1%} of the "
                       f"{here.rate:.3g} that one card does")
    took = f"a request alone has its first token in {seconds(first)} and a further one every {seconds(further)}"
    if aim == "latency":
        limits = [f"{seconds(limit)} for a {what} one" for what, limit in (("first", load.ttft), ("further", load.tpot))
                  if limit is not None]
        return Verdict(False, "latency already met", f"{took}; " + (f"allowed: {', '.join(limits)}" if limits else
                                                                     "no limit is given"))
    return Verdict(False, "fits and fast enough", f"{room.requests:,} requests fit at once; {took}; one card does "
                   f"{here.rate:.3g} requests/s, and {load.rate:g} are asked for")


class Condition(NamedTuple):
    """One of five that disaggregation needs: whether it `holds`, and by which numbers."""

    name: str
    holds: bool
    why: str


@dataclass(frozen=True, repr=False, eq=False)
class Split(Bill):
    """One pool or two, on as many instances either way: requests a second that keep the times in each, and the
    conditions. `prefill` of the instances would compute prompts; `ratio` of that kind to each of the other are in
    balance."""

    headings = ("condition", "why", "", "", "does it hold?")

    load: Load
    instances: int
    one: float
    two: float
    prefill: int
    ratio: float
    conditions: tuple[Condition, ...]

    @property
    def pays(self) -> bool:
        """Whether two pools are worth it: all conditions hold, and they do more than one."""
        return all(each.holds for each in self.conditions) and self.two > self.one

    @property
    def failed(self) -> list[str]:
        """The names of the conditions that don't hold."""
        return [each.name for each in self.conditions if not each.holds]

    @property
    def answer(self) -> str:
        """The verdict in a sentence, with its reason."""
        if self.pays:
            return (f"disaggregate: {self.prefill} for prompts and {self.instances - self.prefill} for answers do "
                    f"{self.two:.3g} requests/s in time, where {self.instances} that do both do {self.one:.3g}")
        why = [each.why for each in self.conditions if not each.holds]
        return "colocate: " + (why[0] if why else f"two pools do {self.two:.3g} requests/s in time, and one does "
                               f"{self.one:.3g}")

    @property
    def title(self) -> str:
        return f"one pool or two, on {self.instances} instances: {self.answer}"

    @property
    def rows(self) -> list[Row]:
        rows = [Row(each.name, each.why, 0, "", "yes" if each.holds else "no") for each in self.conditions]
        split = f"{self.prefill} : {self.instances - self.prefill}" if self.two else "none"
        return [*rows, Row("one pool", "each instance computes prompts and answers", round(self.one, 4), "requests/s"),
                Row("two pools", f"the best split, {split}", round(self.two, 4), "requests/s")]

    def to_dict(self) -> dict[str, Any]:
        """The account as plain data: answer, rates, conditions, rows."""
        kinds = ("answer", "pays", "instances", "one", "two", "prefill", "ratio")
        return {**{kind: getattr(self, kind) for kind in kinds},
                "conditions": [each._asdict() for each in self.conditions], **super().to_dict()}


def why_not_split(step: StepSeconds, load: Load, transfer: Handover, *, instances: int, most: int,
                  decode: StepSeconds | None = None, swing: float = 1.0, switch: bool = False, short: int = SHORT,
                  flight: int = 1) -> Split:
    """Should prompts and answers have cards of their own? Not unless all of this holds:

    1. one pool, with the budget that is best for it, misses the limits together at this rate;
    2. the links have twice B* (`transfer`), or would with a cache in int8;
    3. there are three instances or more, so that a whole number of them is within a fifth of the balanced ratio;
    4. the ratio of prompts to answers stays: its `swing`, the largest over the smallest of a day, is 1.2 at most, or
       instances `switch` roles;
    5. a prompt has more than `short` tokens that no cache holds.

    Twice, three, a fifth, 1.2 and 512 are rules of thumb. `step` is an instance's time of a step (`decode` that of one
    that makes answers, where they differ), `most` what it holds at once. The same number of instances is compared:
    without limits one pool always does as much or more, since no instance waits for the other kind of work.
    """
    whole("instances", instances)
    decode = decode or step
    one = colocated(step, load, most, flight)
    prompts, answers = prefill_pool(step, load, transfer.by_layers, flight), decode_pool(decode, load, most, flight)
    n, two = best_split(prompts.rate, answers.rate, instances) if instances > 1 else (1, 0.0)
    ratio = answers.rate / prompts.rate if prompts.rate else inf  # instances for prompts to each for answers
    off = abs(n / (instances - n) / ratio - 1) if instances > 1 and ratio else inf
    together, links = instances * one.rate, transfer.rate / transfer.break_even
    narrow = 1.0 if transfer.dtype in ("int8", "fp8") else kv_handed(transfer.spec, 1, dtype="int8") / kv_handed(
        transfer.spec, 1, dtype=transfer.dtype)
    int8 = links < PORTS <= links / narrow
    limits = ", ".join(f"{name} {seconds(limit)}" for name, limit in (
        ("first token", load.ttft), ("further ones", load.tpot), ("a gap", load.gap)) if limit is not None)
    conditions = (
        Condition("one pool misses the limits", together < load.rate, f"{instances} instances that do both do "
                  f"{together:.3g} requests/s, {one.how} ({limits or 'no limits'}); {load.rate:g} are asked for"),
        Condition("the links are fast enough", int8 or links >= PORTS, f"{decimal(transfer.rate)}/s are {links:.2g} × "
                  f"B*, of which {PORTS:g} × is wanted" + ", and in int8 reached" * int8),
        Condition("enough instances", instances >= FEW and off <= OFF, f"of {instances} instances the best split, {n} :"
                  f" {max(instances - n, 0)}, is {off:.0%} off the balanced {ratio:.3g} : 1"),
        Condition("a stable mix", switch or swing <= SWING, f"prompts to answers swing by {swing:g} ×, of which "
                  f"{SWING:g} is borne" + ", but roles switch" * switch),
        Condition("long prompts", load.uncached > short, f"{load.uncached:,} tokens of a prompt are computed; up to "
                  f"{short:,} are as well off beside the answers"))
    return Split(load, instances, together, two, n, ratio, conditions)


def alone(card: CardSpec) -> ClusterSpec:
    """A cluster of this one card, which talks to none."""
    nothing = LinkSpec(name="none", per_direction=1.0)
    return ClusterSpec(name=f"1 × {card.name}", card=card, per_domain=1, domains=1, inside=nothing, between=nothing)
