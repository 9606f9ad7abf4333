"""What each rank of a pipeline holds and sends, for the very lists of actions that run.

Exact for `parallel.pipeline.cut` and `parallel.execute.run`: weights, gradients, optimizer states and payload; on a CPU
activations too, between the rank's actions. What is held inside of one comes to it as `peak` says. Ranks differ: the
ends have the embedding or the head, and early stages hold more micro-batches at a time than late ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..schedule import Action, Orders, computing, placement, size
from ..schedule import check as check_schedule
from ..specs import Layout, ModelSpec
from ..specs.check import whole as whole_number
from ..specs.layout import staged
from .activations import activations
from .bill import Bill, Row
from .memory import memory
from .memory_bill import MemoryBill
from .parameters import Parameters, parameters
from .pipeline_rows import rows_of
from .pipeline_stages import StageBill, stage_bill, stages_of
from .pipeline_traffic import PipelineAxis
from .saved import Device
from .sharing import Share
from .traffic import TrafficBill, merged


@dataclass(frozen=True)
class RankBill:
    """Bytes that one rank holds, and sends in a step.

    `live` counts, where it keeps most between two actions, the micro-batches of each stage whose backward is to come,
    `late` those whose weight gradients are; `activations` is what is kept for them. `peak` is the most inside of an
    action, gradients on their way back left out, but for those of the logits. `forward` and `backward` are bytes sent
    to other stages, in `messages` messages.
    """

    rank: int
    stages: tuple[StageBill, ...]
    parameters: int
    weights: int
    gradients: int
    states: int
    live: dict[int, int]
    late: dict[int, int]
    activations: int
    peak: int
    forward: int
    backward: int
    messages: int

    @property
    def held(self) -> int:
        """Bytes of weights, gradients, states, and of activations at most."""
        return self.weights + self.gradients + self.states + self.peak


@dataclass(frozen=True, repr=False)
class RankTraffic(TrafficBill):
    """What one rank hands to messages and collectives in a step."""

    rank: int = 0

    @property
    def title(self) -> str:
        return f"{super().title}, on rank {self.rank} of its pipeline".replace(" by each rank", "")


@dataclass(frozen=True, repr=False, eq=False)
class PipelineBill(Bill):
    """A pipeline's ranks, each of them one of as many as tensor parallelism cuts its stages over, which are alike."""

    spec: ModelSpec
    layout: Layout
    axis: PipelineAxis
    microbatches: int
    recompute: str | None
    optimizer: str
    frozen: tuple[str, ...]
    ranks: tuple[RankBill, ...]

    def __getitem__(self, rank: int) -> RankBill:
        return self.ranks[rank]

    @property
    def hop(self) -> int:
        """Bytes of one message: a micro-batch's stream, or a rank's slice of it."""
        return self.axis.hop

    @property
    def largest(self) -> RankBill:
        """The rank that holds most, the first of equals."""
        return max(self.ranks, key=lambda each: each.held)

    def traffic(self, rank: int, *, start: bool = False, clip: bool = False) -> RankTraffic:
        """All that the rank hands to messages and collectives in a step: `execute.run` and `grads.finish`; with `start`
        also `pipeline.cut`, with `clip` the norm of the gradients. A message counts with its sender and, its room being
        handed in, with its receiver; only the sender's is wire."""
        saved = self.axis.saved
        calls = merged(self.axis.calls(self.ranks[rank].rank, start, clip))
        return RankTraffic(self.spec, self.layout, saved.batch, saved.seq, self.axis.dtype, tuple(calls),
                           self.recompute, self.microbatches, rank)

    def stashed(self, rank: int) -> int:
        """Bytes of weights that PipeDream would keep on the rank, all versions: see `weight_versions`."""
        if any(len(each.stages) > 1 for each in self.ranks):
            raise ValueError("PipeDream has one stage on each rank: give a schedule of that kind, such as 1F1B")
        return weight_versions(len(self.ranks), rank) * self.ranks[rank].weights

    @property
    def title(self) -> str:
        s, tp = self.axis.saved, self.layout.tp
        cut = f" × {self.layout.degrees}" if tp > 1 else ""
        return (f"{self.spec.name}, {len(self.axis.stages)} stages on {len(self.ranks)} ranks{cut}, "
                f"{self.microbatches} micro-batches of {s.batch} × {s.seq} tokens, {self.axis.dtype.name}, "
                f"{self.recompute or 'no'} recomputation")

    @property
    def rows(self) -> list[Row]:
        return rows_of(self)

    @property
    def footnotes(self) -> list[str]:
        notes = ["activations: kept for backward, between two actions of the rank"]
        if self.frozen:
            notes.append("activations as if nothing were frozen, which is a bound from above")
        if any(len(homes) > 1 for homes in self.axis.homes.values()):
            notes.append("stages on two ranks: no run of ours is behind it")
        if self.axis.saved.device != "cpu" or self.spec.beyond_llama:
            notes.append("activations from shapes, no run of ours is behind them")
        return notes

    def to_dict(self) -> dict[str, Any]:
        """The account as plain data: inputs, each rank's bytes, rows."""
        s = self.axis.saved
        inputs = {"model": self.spec.name, **asdict(self.layout), "batch": s.batch, "seq": s.seq,
                  "dtype": self.axis.dtype.name, "recompute": self.recompute, "optimizer": self.optimizer,
                  "frozen": list(self.frozen), "device": s.device, "microbatches": self.microbatches, "hop": self.hop}
        ranks = [asdict(each) | {"stages": [_plain(stage) for stage in each.stages]} for each in self.ranks]
        return {**inputs, "ranks": ranks, **super().to_dict()}


def pipeline(spec: ModelSpec, orders: Orders, *, batch: int, seq: int, layout: Layout | None = None,
             dtype: str = "fp32", recompute: str | None = None, weights: Sequence[float] | None = None,
             optimizer: str = "adamw", master: str | None = None, gradients: str | None = None,
             device: Device = "cpu", frozen: Collection[str] = ()) -> PipelineBill:
    """The bill of one step of the schedule `orders`, whose micro-batches have `batch` × `seq` tokens each.

    `layout` cuts each stage once more, by tp and sp; `weights` are those of `specs.stages.split`. The other arguments
    are `memory`'s and `activations`'. A schedule without backward holds weights alone. Where a stage is on several
    ranks (DualPipe) each has a copy, whose gradients they sum at the end: no run of ours is behind that. Raises
    ValueError where these do, where the schedule is not right (`schedule.check`), on a data axis, on tp for a model
    that is no Llama, and for such a one where backward is split in I and W.
    """
    check_schedule(orders)
    layout = staged(layout)
    if layout.dp > 1:
        raise ValueError(f"dp = {layout.dp}: this is the bill of one replica's pipeline; leave the data axis out")
    if layout.cp > 1 or layout.spreads:
        raise ValueError(f"{layout.degrees}: what a pipeline sends of cut sequences and spread experts is not known "
                         "here; leave cp, ep and etp out")
    if layout.tp > 1 and spec.beyond_llama:
        raise ValueError(f"{spec.name} has {spec.beyond_llama}: the traffic of the Llama kind alone is known; tp = 1")
    count, microbatches = size(orders)
    kinds = {action.kind for order in computing(orders) for action in order}
    trains = kinds != {"F"}
    kept = activations(spec, layout, batch=batch, seq=seq, dtype=dtype, recompute=recompute, device=device)
    whole = memory(spec, layout, dtype=dtype, training=trains, optimizer=optimizer, master=master,
                   gradients=gradients)
    stages, homes = stages_of(spec, count, weights), placement(orders)
    axis = PipelineAxis(spec, layout, kept.dtype, kept.saved, parameters(spec, layout.tp, bool(layout.sp), frozen),
                        stages, {s: [r for r, mine in enumerate(homes) if s in mine] for s in range(count)}, orders,
                        kept.recompute == "full", trains)
    bills = [stage_bill(stage, kept, "I" in kinds) for stage in stages]
    ranks = tuple(_rank(rank, order, [bills[s] for s in mine], axis, whole, trains)
                  for rank, (order, mine) in enumerate(zip(orders, homes, strict=True)))
    return PipelineBill(spec, layout, axis, microbatches, kept.recompute, optimizer, tuple(frozen), ranks)


def weight_versions(ranks: int, rank: int) -> int:
    """How many versions of its weights PipeDream keeps on a rank (arXiv:1806.03377, §3.3): p − r of them, since a
    micro-batch's backward pass takes the weights of its forward pass, and there are as many under way as there are
    stages from here to the end. With a flush, as all schedules here have, it is one. A formula with no run behind it.
    """
    ranks, rank = whole_number("ranks", ranks), whole_number("rank", rank, 0)
    if rank >= ranks:
        raise ValueError(f"rank = {rank} is none of {ranks} ranks: the last is {ranks - 1}")
    return ranks - rank


def _plain(bill: StageBill) -> dict[str, Any]:
    n = bill.stage.layers
    return {"stage": bill.stage.number, "layers": [n.start, n.stop], "kept": bill.kept, "put_off": bill.put_off,
            "passing": bill.passing}


def _rank(rank: int, order: Sequence[Action], mine: Sequence[StageBill], axis: PipelineAxis, whole: MemoryBill,
          trains: bool) -> RankBill:
    held = axis.parameters.of([each.stage for each in mine], axis.spec.tied)
    states = _states(whole, held)
    kinds = Counter(action.kind for action in order)
    sent = [kinds[kind] for kind in ("send F", "send B")]
    live, late, most, peak = _most(order, {each.stage.number: each for each in mine}) if trains else ({}, {}, 0, 0)
    return RankBill(rank, tuple(mine), sum(each.numel for each in held), states.weights, states.gradients,
                    states.states, live, late, most, peak, sent[0] * axis.hop, sent[1] * axis.hop, sum(sent))


def _states(whole: MemoryBill, held: Parameters) -> MemoryBill:
    """The bill of the whole model's states, for what a rank has of them."""
    numbers, stepped = (sum(each.numel for each in some) for some in (held, held.trained))
    return replace(whole, stored={"all": numbers * whole.width},
                   share=Share(numbers, stepped, 0, stepped, len(held.trained)))


def _most(order: Sequence[Action], stages: dict[int, StageBill]) -> tuple[dict[int, int], dict[int, int], int, int]:
    """Walk the list: where most is kept between two actions, of how many micro-batches of each stage, and how much; and
    the most inside of an action."""
    live, late = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0)
    now = most = peak = 0
    at = live, late
    for kind, number, *_ in computing([order])[0]:
        stage = stages[number]
        if kind == "F":
            live[number] += 1
            now += stage.kept
        elif kind == "W":
            late[number] -= 1
            now -= stage.put_off
        else:
            peak = max(peak, now + stage.passing)
            live[number] -= 1
            now -= stage.kept
            if kind == "I":
                late[number] += 1
                now += stage.put_off
        if now > most:
            most, at = now, (dict(live), dict(late))
    held, put_off = ({s: n for s, n in some.items() if n} for some in at)
    return held, put_off, most, max(peak, most)
