"""What a step sends over the expert axis: tokens to the ranks of their experts and back, by what the router has chosen.

Exact in payload, call by call, for `parallel.expert.cut` and `parallel.grads`. A layer's ranks tell each other how many
rows there are for each expert, then send them (dispatch) and get back what the experts make of them (combine); backward
the same two ways, the other way round. A layer computed again sends its rows again, but not the numbers, which are
kept. What to expect before a router has chosen is `cost.dispatch`'s to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..specs import Dtype, Layout, ModelSpec
from .collective import Collective, Phase, alike
from .parameters import Parameters

Routed = Sequence[Sequence[Sequence[int]]]


class Rows(NamedTuple):
    """Of one pass through one layer: rows that a rank sends to experts' ranks, that its experts get, and that do not
    leave it."""

    given: int
    taken: int
    own: int


@dataclass(frozen=True)
class ExpertAxis:
    """The calls of a rank over its expert axis. `passes` are the rows of each pass through a layer with experts,
    `parameters` the rank's experts."""

    spec: ModelSpec
    parameters: Parameters
    layout: Layout
    passes: Sequence[Rows]
    dtype: Dtype

    def start(self, everything: Parameters) -> Iterator[Collective]:
        """Which model and experts each rank has; copies become those of the first rank that has them: of `everything`,
        for layers that are another stage's go later."""
        yield from alike("ep", "all_gather", "start", "which model", [1], 8, self.layout.ep)
        if self.layout.expert_replicas > 1:
            yield from alike("edp", "all_gather", "start", "which model", [1], 8, self.layout.expert_replicas)
            if self.parameters:
                yield from alike("edp", "all_gather", "start", "which experts", [4], 8, self.layout.expert_replicas)
            yield from alike("edp", "broadcast", "start", "experts", [each.numel for each in everything],
                             self.dtype.bytes, self.layout.expert_replicas)

    def forward(self) -> Iterator[Collective]:
        """How many rows, in int64, the rows, and what is made of them."""
        assert self.spec.experts is not None
        experts = self.spec.experts.routed
        for rows in self.passes:
            yield Collective("ep", "all_to_all", "forward", "rows for each expert", 1, experts * 8, self.layout.ep,
                             f"{experts} × 8 B", experts * 8 // self.layout.ep)
            yield self._there("forward", "dispatch", rows)
            yield self._back("forward", "combine", rows)

    def backward(self, again: bool) -> Iterator[Collective]:
        """Gradients go the ways of what they are of, back; before that, rows of layers computed again."""
        for rows in self.passes:
            if again:
                yield self._there("backward", "dispatch, again", rows)
                yield self._back("backward", "combine, again", rows)
            yield self._there("backward", "combine", rows)
            yield self._back("backward", "dispatch", rows)

    def finish(self) -> Iterator[Collective]:
        """The gradients of a rank's experts, over the ranks that have the same ones."""
        numbers = sum(each.numel for each in self.parameters.trained)
        if numbers and self.layout.expert_replicas > 1:
            yield from alike("edp", "all_reduce", "finish", "experts", [numbers], self.dtype.bytes,
                             self.layout.expert_replicas)

    def clip(self) -> Iterator[Collective]:
        """The sum of squares of what ranks have different experts of."""
        if self.parameters:
            yield from alike("ep", "all_reduce", "clip", "norm", [1], 8, self.layout.ep)

    def _there(self, phase: Phase, what: str, rows: Rows) -> Collective:
        return self._call(phase, what, rows.given, rows.own)

    def _back(self, phase: Phase, what: str, rows: Rows) -> Collective:
        return self._call(phase, what, rows.taken, rows.own)

    def _call(self, phase: Phase, what: str, rows: int, own: int) -> Collective:
        row, width = self.spec.hidden, self.dtype.bytes
        return Collective("ep", "all_to_all", phase, what, 1, rows * row * width, self.layout.ep,
                          f"{rows:,} rows × {row:,} × {width} B", own * row * width)


def busiest(axes: Sequence[ExpertAxis]) -> ExpertAxis:
    """The one whose rank sends most rows, the first of equals."""
    return max(axes, key=lambda axis: sum(rows.given + rows.taken for rows in axis.passes))


def rows_of(routed: Routed, layout: Layout, number: int) -> Iterator[Rows]:
    """The rows of each pass, of the rank that has this number among those with the same layers, where `routed[r]` is
    what number r has chosen: `Routing.counts`, in the order of the passes."""
    ep, etp = layout.ep, layout.expert_tp
    first = number // (ep * etp) * ep * etp + number % etp
    me = number // etp % ep
    peers = [routed[first + i * etp] for i in range(ep)]
    for counts in zip(*peers, strict=True):
        some = len(counts[me]) // ep
        mine = slice(me * some, (me + 1) * some)
        yield Rows(sum(counts[me]), sum(sum(each[mine]) for each in counts), sum(counts[me][mine]))


def even_rows(spec: ModelSpec, layout: Layout, tokens: int) -> Rows:
    """Those of a pass of so many tokens where all experts are asked for alike."""
    assert spec.experts is not None
    return Rows(tokens * spec.experts.active, tokens * spec.experts.active, tokens * spec.experts.active // layout.ep)


def loads(spec: ModelSpec, axis: str, ranks: int) -> Iterator[Collective]:
    """How many tokens each expert of each layer has got, and how many were dropped, summed over the axis."""
    if spec.experts is not None and ranks > 1:
        layers = spec.layers - spec.experts.first_dense
        yield from alike(axis, "all_reduce", "balance", "loads of experts", [layers * (spec.experts.routed + 1)], 8,
                         ranks)


def check_routed(spec: ModelSpec, layout: Layout, routed: Routed | None, passes: int) -> Routed:
    """`routed`, if it is what every rank has chosen in so many passes; ValueError if not."""
    assert spec.experts is not None
    layers, experts = spec.layers - spec.experts.first_dense, spec.experts.routed
    if routed is None:
        raise ValueError(f"ep = {layout.ep}: what travels depends on what the router chooses: give routed=, the counts "
                         f"of each rank, layer and expert, or ask cost.dispatch what to expect")
    lengths = {len(each) for each in routed}
    if len(routed) != layout.world_size or lengths != {layers * passes}:
        raise ValueError(f"routed has {len(routed)} ranks with {sorted(lengths)} passes through a layer with experts; "
                         f"{layout.world_size} with {layers} × {passes} each are wanted")
    if sizes := {len(counts) for each in routed for counts in each} - {experts}:
        raise ValueError(f"routed counts {sorted(sizes)} experts, and a layer of {spec.name} has {experts}")
    return routed
