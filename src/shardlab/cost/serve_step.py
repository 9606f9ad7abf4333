"""How long a serving step takes: a roofline of the work in it, and the collectives it cannot do without.

    matrices     FLOP of all new tokens, or the weights read once for all of them, whichever takes longer
    attention    of each request, FLOP of its scores, or its cache read, whichever takes longer
    collectives  two sums a layer over the tensor axis, experts' messages there and back, hand-overs between stages

So a prompt is bound by arithmetic, decodes by memory, and a step with both in it by either, part by part. What no
formula gives is `Speeds`: the shares of a card's and a link's rates that software reaches, and what a layer costs
besides, all assumed unless said to be measured. No run of ours is behind these seconds.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..specs import ClusterSpec, Layout, ModelSpec
from ..specs.check import number
from ..specs.layout import layout_of, served
from ..specs.units import decimal, seconds
from .bill import Bill, Row
from .kv import width_of
from .queueing import Work
from .serve_parts import Attention, Part, attention_of, parts_of, seen, unspread
from .step_time_axes import Group, Sent, groups_of, handed_out, round_the_ring, sent
from .step_time_speeds import Speeds

WIDTH = 2  # bytes of a number of the stream between layers, bf16
PARTS = ("matrices", "attention", "tensor axis", "experts' messages", "hand-overs", "overhead")


@dataclass(frozen=True, eq=False)
class ServeStep:
    """Seconds of a step, `ServeStep(work)`, where `work` is (new tokens, context, the new ones included) of each
    request in it: the `step_time=` of schedulers and simulators. Of a pipeline it is one batch's way through all
    stages; others may be under way behind it, one in each stage.

    Where there are several data ranks, `work` is one rank's, and the others are taken to have as much.
    """

    spec: ModelSpec
    layout: Layout
    cluster: ClusterSpec
    dtype: str
    kv_dtype: str
    arithmetic: str
    handed: str
    speeds: Speeds
    sync: float | None
    stages: tuple[Part, ...]
    attention: Attention
    groups: dict[str, Group]

    def __call__(self, work: Work) -> float:
        return sum(self.parts(work).values())

    def parts(self, work: Work) -> dict[str, float]:
        """Seconds of each part: `PARTS`. Of no work, none."""
        if not work:
            return dict.fromkeys(PARTS, 0.0)
        kinds = list(seen(work, self.spec))
        each = [self._stage(part, kinds, len(work)) for part in self.stages]
        return {name: sum(some[name] for some in each) for name in PARTS}

    def pace(self, work: Work) -> float:
        """Seconds between two batches at the end of a pipeline: those of its slowest stage."""
        kinds = list(seen(work, self.spec))
        return max(sum(self._stage(part, kinds, len(work)).values()) for part in self.stages)

    def bill(self, work: Work) -> StepBill:
        """The parts of a step with how they come about."""
        return StepBill(self, tuple(work))

    def _stage(self, part: Part, kinds: list[tuple[int, int, int, float, float]], requests: int) -> dict[str, float]:
        tokens, rate, memory_rate = sum(times * new for times, new, *_ in kinds), self.rate, self.memory
        met = 1.0
        if self.spec.experts:
            asking = tokens * self.layout.ep * self.layout.expert_tp / self.layout.tp
            met = 1 - (1 - self.spec.experts.active / self.spec.experts.routed) ** asking
        flop = tokens * part.flop + requests * part.head
        core = sum(times * max(self.attention.flop(new, context, pairs) / rate,
                               read * self.attention.nbytes / memory_rate)
                   for times, new, context, pairs, read in kinds)
        tp, ep, hop = self.sent(part, tokens, requests)
        return {"matrices": max(flop / rate, (part.nbytes + met * part.experts) / memory_rate),
                "attention": part.layers * core,
                "tensor axis": tp.seconds(self.cluster, self.speeds) if self.sync is None else (
                    self.calls(part) * self.sync + Sent(*tp[:2]).seconds(self.cluster, self.speeds)),
                "experts' messages": max(ep.apart(self.cluster, self.speeds)),
                "hand-overs": hop.seconds(self.cluster, self.speeds), "overhead": part.layers * self.speeds.overhead}

    @property
    def rate(self) -> float:
        """FLOP a second that a card reaches."""
        return self.cluster.card.flop_rate(self.arithmetic) * self.speeds.share

    @property
    def memory(self) -> float:
        """Bytes a second that a card reaches."""
        return self.cluster.card.hbm * self.speeds.memory

    def calls(self, part: Part) -> int:
        """Collectives of the tensor axis in a step: two a layer, one for the embedding and one for the logits."""
        return (2 * part.layers + part.first + part.last) * (self.layout.tp > 1)

    def sent(self, part: Part, tokens: int, requests: int) -> tuple[Sent, Sent, Sent]:
        """What a rank sends in a step over the tensor axis, to experts and back, and to the next stage."""
        spec, layout, tp, ep, hop = self.spec, self.layout, Sent(), Sent(), Sent()
        stream = tokens * spec.hidden * WIDTH
        if layout.tp > 1:
            whole = part.mixture if layout.expert_tp != layout.tp else 0  # those gather slices, and add nothing up
            tp = sent("all_reduce", stream, self.groups["tp"]).times(2 * part.layers - whole + part.first)
            tp = tp.plus(sent("all_gather", stream / layout.tp, self.groups["tp"]).times(whole))
            if part.last:
                logits = requests * spec.vocab / layout.tp * WIDTH
                tp = tp.plus(sent("all_gather", logits, self.groups["tp"]))
        group, mixture = self.groups["ep"], spec.experts
        if mixture and group.ranks > 1:
            own = tokens * layout.expert_tp / layout.tp
            reach = mixture.top_groups if mixture.groups > 1 and group.domains <= mixture.groups else None
            there, back = (handed_out(own, spec.hidden * width, mixture.active, reach, group)
                           for width in (width_of(self.handed), WIDTH))
            # all peers are sent to at once, as serving's kernels do (DeepEP's for low latency): α counts once a way
            both = there.plus(back)
            both = both._replace(hops_inside=min(2, both.hops_inside), hops_between=min(2, both.hops_between))
            ep = both.times(part.mixture)
        if not part.last:
            hop = round_the_ring(stream, 1, self.groups["pp"])
        return tp, ep, hop


@dataclass(frozen=True, repr=False, eq=False)
class StepBill(Bill):
    """One step, part by part."""

    headings = ("what", "how it comes about", "", "", "of the step")

    step: ServeStep
    work: Work

    @property
    def tokens(self) -> int:
        """New tokens in it."""
        return sum(new for new, _ in self.work)

    @property
    def calls(self) -> int:
        """Collectives of the tensor axis, one after the other."""
        return sum(map(self.step.calls, self.step.stages))

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.step(self.work)

    @property
    def title(self) -> str:
        one = self.step
        return (f"{one.spec.name}, {one.layout.degrees}, on {one.cluster.card.name}s: a step of {len(self.work):,} "
                f"request{'s' * (len(self.work) > 1)} and {self.tokens:,} new token{'s' * (self.tokens > 1)}, "
                f"{seconds(self.seconds)}")

    @property
    def rows(self) -> list[Row]:
        parts = self.step.parts(self.work)
        rows = [Row(name, text, round(1000 * parts[name], 4), "ms", f"{parts[name] / self.seconds:.1%}")
                for name, text in self._texts().items() if parts[name]]
        return [*rows, Row("a step", "sum of these", round(1000 * self.seconds, 4), "ms")]

    @property
    def footnotes(self) -> list[str]:
        speeds = self.step.speeds
        said = ", ".join(f"{name} {getattr(speeds, name):.3g} ({speeds.how(name)})"
                         for name in ("share", "memory", "links", "overhead"))
        return [f"Taken for granted: {said}. No run of ours is behind it."]

    def to_dict(self) -> dict[str, Any]:
        """The bill as plain data: inputs, work, seconds of each part, rows."""
        one = self.step
        return {"model": one.spec.name, "cluster": one.cluster.name, **asdict(one.layout),
                "work": [list(each) for each in self.work], "seconds": self.seconds, "parts": one.parts(self.work),
                "calls": self.calls, **super().to_dict()}

    def _texts(self) -> dict[str, str]:
        one = self.step
        flop = sum(self.tokens * part.flop + len(self.work) * part.head for part in one.stages)
        pairs = sum(times * pairs for times, _, _, pairs, _ in seen(self.work, one.spec))
        sent_by = [one.sent(part, self.tokens, len(self.work)) for part in one.stages]
        tp, ep, hop = (sum(each[i].inside + each[i].between for each in sent_by) for i in range(3))
        nbytes = sum(part.nbytes + part.experts for part in one.stages)
        return {"matrices": f"{flop:.4g} FLOP, or up to {decimal(nbytes)} of weights read",
                "attention": f"{pairs:,.0f} pairs a layer, or caches read",
                "tensor axis": f"{self.calls} collectives, {decimal(tp)} sent by each rank",
                "experts' messages": f"{decimal(ep)} sent by each rank",
                "hand-overs": f"{one.layout.pp - 1} × to the next stage, {decimal(hop)}",
                "overhead": f"{one.spec.layers} layers × {seconds(one.speeds.overhead) if one.speeds.overhead else 0}"}


def serve_step(spec: ModelSpec, layout: Layout | None, cluster: ClusterSpec, *, dtype: str = "bf16",
               kv_dtype: str = "bf16", arithmetic: str = "bf16", handed: str = "bf16", speeds: Speeds | None = None,
               sync: float | None = None, redundant: int = 0) -> ServeStep:
    """The time of a step of `spec`, laid out on the first cards of `cluster`, weights stored as `dtype`.

    Of `speeds` it takes `share`, `memory`, `links` and `overhead` (seconds a layer). Matrices are multiplied in
    `arithmetic`, tokens go to experts in `handed` and come back in bf16. `sync` is seconds that a collective of the
    tensor axis takes before its first byte, as measured ones do (26 to 29 µs: NCCL on 8 A100 or H100, in Vidur's data);
    None leaves the messages of a ring, with the link's α. Nothing of them is taken to hide behind arithmetic. Each
    layer may have `redundant` copies of experts. Raises ValueError on a layout that `spec` doesn't allow or `cluster`
    has no cards for, on compressed attention, and on dtypes that the card doesn't compute in.
    """
    layout = layout_of(layout)
    served(unspread(layout)).check(spec)
    layout.check(spec, redundant)
    if layout.world_size > cluster.cards:
        raise ValueError(f"{layout.degrees} takes {layout.world_size} cards, and {cluster.name} has {cluster.cards}")
    if spec.compressed or (layout.pp > 1 and spec.window):
        raise ValueError(f"{spec.name}: how long compressed attention takes, or windows in a pipeline, is not known "
                         "here")
    if sync is not None:
        number("sync", sync)
    cluster.card.flop_rate(arithmetic)
    stages = tuple(parts_of(spec, layout, dtype, redundant))
    return ServeStep(spec, layout, cluster, dtype, kv_dtype, arithmetic, handed, speeds or Speeds(), sync, stages,
                     attention_of(spec, layout, kv_dtype), groups_of(layout, cluster))
