"""The search over layouts: what each holds and how long it takes, by closed forms, thousands of them in a second.

A pipeline of stages that take F and B takes, at least, the sum of both over all stages for the first micro-batch and
the longest for each further one; schedules that do better have their published idle time beside the busiest rank's.
The lists that run say more exactly (`step_time`); that is for the few that are best.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, reduce
from itertools import groupby
from math import inf
from operator import itemgetter
from typing import Any, NamedTuple

from ..specs import ClusterSpec, Layout, ModelSpec
from ..specs.units import parse_bytes
from .pipeline_stages import stages_of
from .planner_memory import Kept, States, fullest, kept_of
from .planner_rules import Way, axes, schedules, ways, zeros
from .step_time import times_of
from .step_time_axes import group_of, round_the_ring
from .step_time_end import ending
from .step_time_layers import Layers
from .step_time_pass import Kinds, Pass, Shape, shape_of
from .step_time_speeds import Speeds
from .time import attention_flops
from .timeline import Times

FAR = 1.5  # times the best: what takes longer is not looked at further


class Candidate(NamedTuple):
    """A layout that fits: about how many seconds its step takes, and bytes that a rank holds at most."""

    seconds: float
    held: float
    layout: Layout
    batch: int
    recompute: str | None


class Cut(NamedTuple):
    """What one micro-batch takes of each stage, keeps there, has besides inside of a pass, and keeps where its weight
    gradients are put off; and the numbers of the largest layer or end, which ZeRO-3 gathers."""

    layers: Layers
    passes: Sequence[Pass]
    times: Sequence[Times]
    kept: Sequence[float]
    within: Sequence[float]
    late: Sequence[float]
    unit: float


@dataclass
class Search:
    """All layouts of a model on a cluster, for steps of so many sequences. `tried` counts what was looked at, `fit`
    what fits in the card's memory less `reserve`; `least` is the fewest bytes that any holds, `best` the fewest
    seconds."""

    spec: ModelSpec
    cluster: ClusterSpec
    sequences: int
    seq: int
    dtype: str
    arithmetic: str
    handed: str
    speeds: Speeds
    share_experts: bool
    modes: Sequence[str | None]
    optimizer: str
    reserve: str
    tried: int = 0
    fit: int = 0
    least: float = inf
    best: float = inf
    _known: dict = field(default_factory=dict)

    def __post_init__(self):
        self._states, self._set_aside = States.of(self.dtype, self.optimizer), parse_bytes(self.reserve)

    def candidates(self) -> Iterator[Candidate]:
        """Those that fit."""
        for _, same in groupby(axes(self.spec, self.cluster, self.seq), key=itemgetter(0, 1)):
            for tp, pp, cp in same:  # cp from below: cut sequences only where whole ones do not do
                found = [one for way in ways(self.spec, self.cluster, self.sequences, tp, pp, cp)
                         for one in self._of(way)]
                yield from found
                if found:
                    break

    def _of(self, way: Way) -> Iterator[Candidate]:
        """With each schedule. None is tried where the first, which holds least, holds too much with all that helps."""
        how = list(schedules(self.spec, way.cuts["pp"], way.microbatches))
        if self._tried(way, how[0], zeros(way.cuts)[-1], self.modes[-1])[2] > self.cluster.card.memory:
            return
        for each in how:
            if one := self._first(way, each):
                yield one

    def _first(self, way: Way, how: dict[str, Any]) -> Candidate | None:
        """With the least of ZeRO, then of recomputation, that fits; None too where that takes far longer than others.
        """
        for zero in zeros(way.cuts):
            if self._tried(way, how, zero, self.modes[-1])[2] > self.cluster.card.memory:
                continue
            for mode in self.modes:
                layout, cut, held = self._tried(way, how, zero, mode)
                if held <= self.cluster.card.memory:
                    self.fit += 1
                    seconds = self._seconds(layout, cut)
                    return None if seconds is None else Candidate(seconds, held, layout, way.batch, mode)
        return None

    def _tried(self, way: Way, how: dict[str, Any], zero: int, mode: str | None) -> tuple[Layout, Cut, float]:
        """A layout, and the bytes that its ranks hold at most."""
        self.tried += 1
        layout = Layout(**way.cuts, **how, zero=zero, microbatches=way.microbatches)
        cut = self._cut(layout, way.batch, mode)
        held = self._set_aside + self._held(layout, cut, self._states.each(layout, self.share_experts))
        self.least = min(self.least, held)
        return layout, cut, held

    def _cut(self, layout: Layout, batch: int, mode: str | None) -> Cut:
        """The same for all schedules with as many stages; what layers take and keep, for all pipelines."""
        alike = layout.tp, layout.cp, layout.ep, layout.etp, batch, mode
        key = (*alike, layout.stages)
        if key not in self._known:
            if alike not in self._known:
                layers = Layers(self.spec, layout, self.cluster, self.speeds, batch, self.seq, self.dtype,
                                self.arithmetic, self.handed, mode)
                alone = replace(layout, pp=1, schedule=None, chunks=1)
                kept = kept_of(self.spec, alone, batch, self.seq, self.dtype, self.arithmetic, mode)
                self._known[alike] = layers, layers.kinds(), kept
            shapes = stages_for(self.spec, layout.stages, self.seq)
            layers, kinds, kept = self._known[alike]
            self._known[key] = _made(layers, kinds, kept, shapes)
        return self._known[key]

    def _held(self, layout: Layout, cut: Cut, each: tuple[float, float]) -> float:
        """Of the rank that holds most, but for what is set aside."""
        most, (spread, rest) = 0.0, each
        m = layout.microbatches if layout.pp > 1 else 1
        for moments in fullest(layout.kind, layout.pp, m, layout.chunks):
            mine = [stage for stage, _ in moments[0].live]
            states = sum(cut.passes[stage].rest * rest + cut.passes[stage].spread * spread for stage in mine)
            kept = max(sum(n * cut.kept[stage] for stage, n in live)
                       + late * max(cut.late[stage] for stage in mine) for live, late in moments)
            most = max(most, states + kept + max(cut.within[stage] for stage in mine))
        # weights of one unit and the next, and gradients of one and the one before
        return most + (4 * cut.unit * self._states.width if layout.zero == 3 else 0)

    def _seconds(self, layout: Layout, cut: Cut) -> float | None:
        """About how long a step takes; None where its passes alone take half as long again as the best step."""
        places = [[stage for stage, _ in moments[0].live]
                  for moments in fullest(layout.kind, layout.pp, layout.microbatches, layout.chunks)]
        line = layout.microbatches * (cut.times[0].forward + cut.times[0].backward)
        if layout.pp > 1:
            group = group_of(layout.pp, layout.distance("pp"), self.cluster)
            hop = round_the_ring(cut.layers.saved.stream().nbytes, 1, group).seconds(self.cluster, self.speeds)
            line = pipelined(layout, cut.times, places, hop)
        if line > FAR * self.best:
            return None
        held = max((reduce(Pass.plus, (cut.passes[stage] for stage in mine)) for mine in places),
                   key=lambda one: one.rest + one.spread)
        end = ending(cut.layers.of(layout), held, layout.microbatches, self.spec.tied and layout.pp > 1)
        self.best = min(self.best, line + end.data + end.optimizer)
        return line + end.data + end.optimizer


def _made(layers: Layers, kinds: Kinds, kept: tuple[Kept, Kept], shapes: Sequence[Shape]) -> Cut:
    passes = {shape: kinds.together(shape) for shape in set(shapes)}
    times = {shape: times_of(made, layers.speeds) for shape, made in passes.items()}
    live, late = ({shape: one.of(shape) for shape in passes} for one in kept)
    return Cut(layers, [passes[shape] for shape in shapes], [times[shape] for shape in shapes],
               [live[shape][0] for shape in shapes], [live[shape][1] for shape in shapes],
               [late[shape][0] for shape in shapes], max(one.rest for one in kinds[:4]))


def pipelined(layout: Layout, times: Sequence[Times], places: Sequence[Sequence[int]], hop: float) -> float:
    """Seconds of a pipeline, about: of the ranks at `places`, with so many seconds a hop."""
    p, m = layout.pp, layout.microbatches
    both = [one.forward + one.backward for one in times]
    if layout.kind in ("1f1b", "gpipe"):
        waits = 2 * hop * (p - 1) * (m / p if layout.kind == "1f1b" else 1)
        return sum(both) + (m - 1) * max(both) + waits
    mean = Times(*(sum(getattr(one, name) for one in times) / len(times) for name in ("forward", "input", "weight")))
    fill = 2 * hop * (p - 1)
    if layout.kind in ("dualpipe", "dualpipe_v"):
        return max(_paired(layout, mine, times, r) for r, mine in enumerate(places)) + fill + max(
            0.0, (p / 2 if layout.kind == "dualpipe" else p) - 1) * max(0.0, (
                sum(one.both or one.forward + one.backward for one in times) / len(times)
                + mean.backward - 3 * mean.weight))
    busy = max(m * sum(both[stage] for stage in mine) for mine in places)
    if layout.kind == "interleaved":
        return busy + (p - 1) * (mean.forward + mean.backward) + fill * layout.chunks
    return busy + (p - 1) * max(0.0, mean.forward + mean.input - mean.weight) + fill * m / p


def _paired(layout: Layout, mine: Sequence[int], times: Sequence[Times], rank: int) -> float:
    """What a rank of DualPipe's computes: the pairs of its list, and what runs alone."""
    p, half = (layout.pp // 2, layout.microbatches // 2) if layout.kind == "dualpipe" else (
        layout.pp, layout.microbatches)
    depth = min(rank, layout.pp - 1 - rank) if layout.kind == "dualpipe" else rank
    pairs = 2 * (half - 2 * p + depth + 1) + (p - 1 - depth)
    alone = sum(times[stage].forward + times[stage].backward for stage in mine)
    together = sum(times[stage].both or times[stage].forward + times[stage].backward for stage in mine)
    return pairs * together / 2 + (2 * half - pairs) * alone / 2


@lru_cache(maxsize=64)
def stages_for(spec: ModelSpec, count: int, seq: int) -> tuple[Shape, ...]:
    """The stages of a pipeline that compute alike."""
    return tuple(shape_of(stage, spec) for stage in
                 stages_of(spec, count, weights_for(spec, seq) if count > 1 else None))


@lru_cache(maxsize=8)
def weights_for(spec: ModelSpec, seq: int) -> tuple[float, ...]:
    """What each layer weighs, the embedding before and the head behind: FLOP a token, for `specs.stages.split`."""
    attention = attention_flops(spec, seq) / seq / spec.layers
    each: list[float] = []
    for layers, kind in spec.kinds():
        used = sum((spec.experts.active if spec.experts and tensor.group == "experts" else times) * tensor.size
                   for times, tensor in kind if len(tensor.shape) == 2)
        each += [2 * used + attention] * len(layers)
    return (0.0, *each, 2.0 * spec.vocab * spec.hidden)
