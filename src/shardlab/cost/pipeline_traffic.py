"""What a rank of a pipeline hands to its messages and collectives in one step, for the list that it does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from ..schedule import Action, Orders
from ..specs import Dtype, Layout, ModelSpec
from .collective import Collective, Phase, alike
from .context_traffic import ContextAxis
from .data_rows import DataRows
from .data_traffic import DataAxis
from .expert_traffic import ExpertAxis, Routed, Rows, even_rows, loads, rows_of
from .parameters import Parameters, Stage, parameters_of
from .places import Place, rank_at
from .saved import Saved
from .sharing import own
from .tensor_traffic import TensorAxis

_HOPS: dict[str, tuple[str, Phase, str]] = {
    "send F": ("send", "forward", "stream"), "recv F": ("recv", "forward", "stream"),
    "send B": ("send", "backward", "gradient of the stream"), "recv B": ("recv", "backward", "gradient of the stream")}

Routes = Routed | Literal["even"] | None


@dataclass(frozen=True)
class PipelineAxis:
    """The calls of the ranks of a pipeline, each doing its list. `homes` says which places have each stage; `layout` is
    that of the ranks at one place, and `whole` that of all."""

    spec: ModelSpec
    whole: Layout
    layout: Layout
    dtype: Dtype
    saved: Saved
    frozen: Collection[str]
    places: Sequence[Place]
    homes: Mapping[int, Collection[int]]
    orders: Orders
    recompute: str | None
    trains: bool
    bucket: int

    @property
    def hop(self) -> int:
        """Bytes of one message: the stream of a micro-batch, or with sequence parallelism a rank's slice of it."""
        return self.saved.stream().nbytes

    def at(self, place: int, number: int, routed: Routes) -> RankAxis:
        """The calls of the rank that has this number at the place. Raises ValueError on tp for a model that is no
        Llama."""
        if self.layout.tp > 1 and self.spec.beyond_llama:
            raise ValueError(f"{self.spec.name} has {self.spec.beyond_llama}: over a tensor axis the traffic of the "
                             "Llama kind alone is known")
        return RankAxis(self, self.places[place], number, routed)


@dataclass(frozen=True)
class RankAxis:
    """The calls of one rank: see `PipelineAxis`."""

    all: PipelineAxis
    place: Place
    number: int
    routed: Routes

    def calls(self, start: bool, clip: bool, loop: bool) -> Iterator[Collective]:
        """All of them: at the start, in passes, between them, and at the end of the step."""
        if start:
            yield from self._start()
        for stage in self.place.stages:
            yield from self._passes(stage)
        if self.experts is not None:
            yield from self.experts.forward()
            yield from self.experts.backward(self.all.recompute == "full") if self.all.trains else ()
        yield from self._hops()
        if self._ranks > 1:
            yield from alike("pp", "broadcast", "forward", "loss of the step", [1], 8, self._ranks)
        if loop:
            yield from self._loop()
        if self.all.trains:
            yield from self._ending(clip or loop)

    @cached_property
    def parameters(self) -> Parameters:
        """The whole model's, of this rank's part of the experts."""
        return parameters_of(self.all.spec, self.all.layout, self.all.frozen, self.number)

    @cached_property
    def held(self) -> Parameters:
        return self.parameters.of(self.place.stages, self.all.spec.tied)

    @cached_property
    def data(self) -> DataAxis:
        rows = DataRows(self.held.apart()[0], self.all.layout, self.all.spec.tied, self.all.dtype.bytes,
                        self.all.bucket, self.place.apart)
        return DataAxis(rows, 1, staged=True)

    @cached_property
    def experts(self) -> ExpertAxis | None:
        if self.all.layout.ep == 1:
            return None
        return ExpertAxis(self.all.spec, self.held.apart()[1], self.all.layout, list(self._rows()), self.all.dtype)

    @property
    def _order(self) -> Sequence[Action]:
        return self.all.orders[self.place.number]

    @property
    def _ranks(self) -> int:
        return len(self.all.orders)

    def _start(self) -> Iterator[Collective]:
        if self.experts is not None:
            yield from self.experts.start(self.parameters.apart()[1])
        if self._ranks > 1:
            yield from alike("pp", "all_gather", "start", "what is cut", [1], 8, self._ranks)
        yield from self._table("broadcast", "start")
        if self.all.layout.data_ranks > 1:
            yield from self.data.start()

    def _rows(self) -> Iterator[Rows]:
        """Of each pass through a layer with experts."""
        spec, layout, routed = self.all.spec, self.all.layout, self.routed
        assert spec.experts is not None
        mixed = {stage.number: sum(layer >= spec.experts.first_dense for layer in stage.layers)
                 for stage in self.place.stages}
        passes = sum(mixed[action.stage] for action in self._order if action.kind == "F")
        if routed == "even":
            yield from [even_rows(spec, layout, self.all.saved.tokens)] * passes
            return
        if routed is None:
            raise ValueError(f"ep = {layout.ep}: what travels depends on what the router chooses: give routed=, the "
                             "counts of each rank, pass and expert, or \"even\"")
        if len(routed) != self.all.whole.world_size:
            raise ValueError(f"routed has {len(routed)} ranks, and there are {self.all.whole.world_size}")
        here = [routed[rank_at(self.all.whole, self.place.number, number)] for number in range(layout.stage_ranks)]
        if (lengths := {len(each) for each in here}) != {passes}:
            raise ValueError(f"routed has {sorted(lengths)} passes through a layer with experts of the ranks with "
                             f"{self.place.what}: {passes} are wanted")
        yield from rows_of(here, layout, self.number)

    def _passes(self, stage: Stage) -> Iterator[Collective]:
        """What the context and the tensor axis do in the passes of the stage: of each micro-batch, in B or I."""
        every, layout, saved = self.all, self.all.layout, self.all.saved
        done = Counter(action.kind for action in self._order if action.stage == stage.number)
        forward: list[Collective] = []
        backward: list[Collective] = []
        if layout.cp > 1:
            context = ContextAxis(every.spec, self.parameters, layout, saved.batch, saved.seq, every.dtype, stage)
            forward += context.forward()
            backward += context.backward(every.recompute)
        if layout.tp > 1:
            tensor = TensorAxis(every.spec, self.parameters, layout, saved.tokens, every.dtype, stage)
            forward += [*tensor.forward(), *(tensor.loss() if stage.last else ())]
            backward += tensor.backward(every.recompute == "full")
        for times, calls in ((done["F"], forward), (done["B"] + done["I"], backward)):
            yield from (replace(call, count=call.count * times) for call in calls)

    def _hops(self) -> Iterator[Collective]:
        stream = self.all.saved.stream()
        for kind, count in Counter(action.kind for action in self._order if action.kind in _HOPS).items():
            op, phase, what = _HOPS[kind]
            yield Collective("pp", op, phase, what, count, self.all.hop, 2, stream.derivation)

    def _loop(self) -> Iterator[Collective]:
        """What the training loop counts and adds up: tokens with labels, losses, how many tokens each expert got."""
        if self.all.layout.data_ranks > 1:
            yield from self.data.loop()
        for axis, ranks in (("dp", self.all.layout.data_ranks), ("pp", self._ranks)):
            yield from loads(self.all.spec, axis, ranks)

    def _ending(self, clip: bool) -> Iterator[Collective]:
        """`grads.finish`, the norm, and what follows the optimizer's step."""
        every, layout, table = self.all, self.all.layout, "embed_tokens.weight"
        coordinate = self.number // layout.tp
        homes = {place for stage in self.place.stages for place in every.homes[stage.number]}
        if len(homes) > 1:
            yield from alike("pp", "all_reduce", "finish", "gradients of the copies",
                             [sum(each.numel for each in self.held.trained)], every.dtype.bytes, len(homes))
        if layout.data_ranks > 1:
            yield from (*self.data.backward(), *self.data.finish())
        if self.experts is not None:
            yield from self.experts.finish()
        numbers, width = self.data.summed(coordinate)
        mine = own(self.data.rows.gradients, coordinate) if layout.zero else numbers
        yield from self._table("all_reduce", "finish", mine.get(table, 0), width)
        tensor = TensorAxis(every.spec, self.held, layout, every.saved.tokens, every.dtype)
        if layout.tp > 1:
            yield from tensor.finish(numbers, width)
        if clip:
            yield from (*tensor.clip(), *self.data.clip(), *(self.experts.clip() if self.experts is not None else ()))
            yield from alike("pp", "all_reduce", "clip", "norm", [1], 8, self._ranks)
        if layout.data_ranks > 1:
            yield from self.data.step()

    def _table(self, op: str, phase: Phase, numbers: int | None = None, width: int | None = None
               ) -> Iterator[Collective]:
        """A tied embedding that first and last stage have at different places: made one at the start, its gradients,
        or the slices that ZeRO leaves here, summed at the end."""
        if not self.place.apart:
            return
        ends = {place.number for place in self.all.places if place.apart}
        table = next(each for each in self.held if each.name == "embed_tokens.weight")
        sent = table.numel if numbers is None else numbers
        if sent:
            yield from alike("pp", op, phase, "tied embedding", [sent], width or self.all.dtype.bytes, len(ends))
