"""What a rank of a pipeline hands to its messages and collectives in one step, for the list that it does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..schedule import Action, Orders
from ..specs import Dtype, Layout, ModelSpec
from .collective import Collective, Phase
from .parameters import Parameters, Stage
from .saved import Saved
from .tensor_traffic import TensorAxis

_HOPS: dict[str, tuple[str, Phase, str]] = {
    "send F": ("send", "forward", "stream"), "recv F": ("recv", "forward", "stream"),
    "send B": ("send", "backward", "gradient of the stream"), "recv B": ("recv", "backward", "gradient of the stream")}


@dataclass(frozen=True)
class PipelineAxis:
    """The calls of the ranks of a pipeline, each doing its list. `homes` says which ranks have each stage; `parameters`
    are the whole model's."""

    spec: ModelSpec
    layout: Layout
    dtype: Dtype
    saved: Saved
    parameters: Parameters
    stages: Sequence[Stage]
    homes: Mapping[int, Collection[int]]
    orders: Orders
    again: bool
    trains: bool

    @property
    def hop(self) -> int:
        """Bytes of one message: the stream of a micro-batch, or with sequence parallelism a rank's slice of it."""
        return self.saved.stream().nbytes

    def calls(self, rank: int, start: bool, clip: bool) -> Iterator[Collective]:
        """All of them: at the start, in passes, between them, and at the end of the step."""
        mine = [stage for stage in self.stages if rank in self.homes[stage.number]]
        held = self.parameters.of(mine, self.spec.tied)
        if start and len(self.orders) > 1:
            yield self._call("all_gather", "start", "what is cut", 8, len(self.orders), "1 × 8 B")
        if start:
            yield from self._table("broadcast", "start", rank, held)
        for stage in mine:
            yield from self._passes(stage, self.orders[rank])
        yield from self._hops(self.orders[rank])
        if len(self.orders) > 1:
            yield self._call("broadcast", "forward", "loss of the step", 8, len(self.orders), "1 × 8 B")
        if self.trains:
            yield from self._ending(rank, mine, held, clip)

    def _passes(self, stage: Stage, order: Sequence[Action]) -> Iterator[Collective]:
        """What the tensor axis does in the passes of the stage: of each micro-batch, in B or I."""
        if self.layout.tp == 1:
            return
        done = Counter(action.kind for action in order if action.stage == stage.number)
        axis = TensorAxis(self.spec, self.parameters, self.layout, self.saved.tokens, self.dtype, stage)
        loss = axis.loss() if stage.last else ()
        for times, calls in ((done["F"], [*axis.forward(), *loss]),
                             (done["B"] + done["I"], axis.backward(self.again))):
            yield from (replace(call, count=call.count * times) for call in calls)

    def _hops(self, order: Sequence[Action]) -> Iterator[Collective]:
        for kind, count in Counter(action.kind for action in order if action.kind in _HOPS).items():
            op, phase, what = _HOPS[kind]
            yield replace(self._call(op, phase, what, self.hop, 2, self.saved.stream().derivation), count=count)

    def _ending(self, rank: int, mine: Sequence[Stage], held: Parameters, clip: bool) -> Iterator[Collective]:
        """`grads.finish`, and the norm."""
        if others := {other for stage in mine for other in self.homes[stage.number]} - {rank}:
            numbers = sum(each.numel for each in held.trained)
            yield self._sum("gradients of the copies", numbers, 1 + len(others))
        yield from self._table("all_reduce", "finish", rank, held)
        axis = TensorAxis(self.spec, held, self.layout, self.saved.tokens, self.dtype)
        if self.layout.tp > 1:
            yield from axis.finish({each.name: each.numel for each in held.trained}, self.dtype.bytes)
        if clip:
            yield from axis.clip()
            yield self._call("all_reduce", "clip", "norm", 8, len(self.orders), "1 × 8 B")

    def _table(self, op: str, phase: Phase, rank: int, held: Parameters) -> Iterator[Collective]:
        """A tied embedding that first and last stage have on different ranks: made one at the start, its gradients
        summed at the end."""
        first, last = (set(self.homes[stage]) for stage in (0, len(self.stages) - 1))
        table = next((each for each in held if each.name == "embed_tokens.weight"), None)
        if self.spec.tied and first != last and table is not None and (table.trained or phase == "start"):
            width = self.dtype.bytes
            yield self._call(op, phase, "tied embedding", table.numel * width, len(first | last),
                             f"{table.numel:,} × {width} B")

    def _sum(self, what: str, numbers: int, ranks: int) -> Collective:
        width = self.dtype.bytes
        return self._call("all_reduce", "finish", what, numbers * width, ranks, f"{numbers:,} × {width} B")

    @staticmethod
    def _call(op: str, phase: Phase, what: str, payload: int, ranks: int, derivation: str) -> Collective:
        return Collective("pp", op, phase, what, 1, payload, ranks, derivation)
