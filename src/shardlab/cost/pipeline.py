"""What each rank of a pipeline holds and sends, for the very lists of actions that run.

Exact for `parallel.layout.cut`, `pipeline.cut` and `execute.run`: weights, gradients, optimizer states and payload; on
a CPU activations too, between the rank's actions. What is held inside of one comes to it as `peak` says. Ranks differ:
the ends have the embedding or the head, and early stages hold more micro-batches at a time than late ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from ..schedule import Orders, computing, placement, size
from ..schedule import check as check_schedule
from ..specs import Layout, ModelSpec
from ..specs.layout import layout_of
from ..specs.rows import BUCKET
from .activations import activations
from .live import Moment, moments
from .memory import States, states_of
from .pipeline_bill import PipelineBill, RankBill, weight_versions
from .pipeline_stages import StageBill, stage_bill
from .pipeline_traffic import PipelineAxis
from .places import Place, alone, places_of
from .saved import Device

__all__ = ["PipelineBill", "RankBill", "pipeline", "weight_versions"]


def pipeline(spec: ModelSpec, orders: Orders | None = None, *, batch: int, seq: int, layout: Layout | None = None,
             dtype: str = "fp32", recompute: str | None = None, weights: Sequence[float] | None = None,
             optimizer: str = "adamw", master: str | None = None, gradients: str | None = None,
             device: Device = "cpu", frozen: Collection[str] = (), bucket: int = BUCKET, share_experts: bool = False
             ) -> PipelineBill:
    """The bill of one step of a pipeline whose micro-batches have `batch` × `seq` tokens each, on each replica.

    `orders` is the schedule, by default that of `layout`, which cuts each stage over more axes and copies it. With
    `orders` it may leave pp out. `weights` are those of `specs.stages.split`. The other arguments are `memory`'s and
    `activations'`. A schedule without backward holds weights alone. Where a stage is on several ranks of a pipeline
    (DualPipe) each has a copy, whose gradients they sum at the end: no run of ours is behind that. Raises ValueError
    where these do, where the schedule is not right (`schedule.check`), on one for other ranks than pp, and on ZeRO-2
    and 3.
    """
    layout = layout_of(layout)
    if orders is None:
        if layout.orders is None:
            raise ValueError(f"{layout.degrees} has no pipeline: give a layout with pp of 2 or more, or the schedule's "
                             "lists")
        layout.check(spec)
        orders = layout.orders
    else:
        check_schedule(orders)
    microbatches = size(orders)[1]
    if layout.pp == 1:
        layout = replace(layout, pp=len(orders), microbatches=microbatches)
    if layout.pp != len(orders):
        raise ValueError(f"the schedule is for {len(orders)} ranks, and pp = {layout.pp}")
    kinds = {action.kind for order in computing(orders) for action in order}
    trains, one = kinds != {"F"}, alone(layout)
    kept = activations(spec, one, batch=batch, seq=seq, dtype=dtype, recompute=recompute, device=device)
    states = states_of(spec, layout, dtype, trains, optimizer, master, gradients, frozen=frozen, bucket=bucket,
                       share_experts=share_experts)
    homes = placement(orders)
    places = places_of(spec, homes, weights)
    at = {stage: [i for i, mine in enumerate(homes) if stage in mine] for mine in homes for stage in mine}
    axis = PipelineAxis(spec, layout, one, kept.dtype, kept.saved, frozen, places, at, orders, kept.recompute, trains,
                        bucket)
    bills = {stage.number: stage_bill(stage, kept, "I" in kinds) for place in places for stage in place.stages}

    def bill_of(place: int, number: int | None = None) -> RankBill:
        return _rank(places[place], number, bills, axis, states)

    return PipelineBill(spec, layout, axis, microbatches, kept.recompute, optimizer, tuple(frozen),
                        tuple(bill_of(place) for place in range(len(places))), bill_of)


def _rank(place: Place, number: int | None, bills: dict[int, StageBill], axis: PipelineAxis, states: States
          ) -> RankBill:
    order, held = axis.orders[place.number], states.of(place, number)
    kinds = Counter(action.kind for action in order)
    sent = [kinds[kind] for kind in ("send F", "send B")]
    at, most, peak = (most_kept(moments(order), bills) if axis.trains else (Moment((), (), None), 0, 0))
    return RankBill(place.number, held.rank, tuple(bills[stage.number] for stage in place.stages),
                    sum(held.elements.values()), held.weights, held.gradients, held.states, dict(at.live),
                    dict(at.late), most, peak, sent[0] * axis.hop, sent[1] * axis.hop, sum(sent))


def most_kept(some: Iterable[Moment], stages: dict[int, StageBill]) -> tuple[Moment, int, int]:
    """At which of the moments between actions most is kept, and how much; and the most inside of an action."""
    at, most, peak = Moment((), (), None), 0, 0
    for moment in some:
        now = sum(n * stages[stage].kept for stage, n in moment.live)
        now += sum(n * stages[stage].put_off for stage, n in moment.late)
        if moment.busy is not None:
            peak = max(peak, now + stages[moment.busy].passing)
        elif now > most:
            at, most = moment, now
    return at, most, max(peak, most)
