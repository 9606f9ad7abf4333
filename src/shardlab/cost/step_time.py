"""How long a training step takes: any layout, on any cluster, before a rank is started.

    a pass        each matrix's roofline, attention, what memory moves; messages of the tensor, context and expert axis
    a pipeline    the very list that runs, with these times (`cost.timeline`)
    the end       what of the data axis's collectives nothing hides, and the optimizer

Messages cost α + bytes/β on the link that their axis crosses. Nothing is fitted here: `Speeds` has the parameters that
no formula gives, and the bill says of each whether it was measured, is from a datasheet, or is assumed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, reduce
from typing import Any

from ..schedule import Orders
from ..specs import ClusterSpec, Layout, ModelSpec
from ..specs.check import number, recompute_mode, whole
from .parameters import Stage
from .pipeline_stages import stages_of
from .step_time_bill import StepTime
from .step_time_end import ending
from .step_time_layers import AXES, Layers
from .step_time_pass import Pass, shape_of
from .step_time_speeds import Speeds
from .timeline import Timeline, Times, timeline


def step_time(spec: ModelSpec, layout: Layout, cluster: ClusterSpec, *, batch: int, seq: int, dtype: str = "bf16",
              arithmetic: str | None = None, handed: str | None = None, recompute: str | None = None,
              weights: Sequence[float] | None = None, speeds: Speeds | None = None) -> StepTime:
    """The time of one step: `layout.microbatches` micro-batches of `batch` × `seq` tokens on each replica, AdamW.

    The ranks fill the domains of `cluster` in order. Weights, gradients and activations are in `dtype`; matrices are
    multiplied in `arithmetic` and tokens go to experts in `handed` (both `dtype` if None, or "fp8"), from where they
    come back in `dtype`. `weights` are those of `specs.stages.split`, as `parallel.pipeline.cut` takes them.

    `recompute` is the model's, or "light", which is priced alone: norms, the gate's product and projections up from a
    latent are computed again (DeepSeek-V3, arXiv:2412.19437, §3.2.3).

    For a machine that was measured: a `ClusterSpec` whose card and links have the measured rates and α, and
    `Speeds(share=1, memory=1, links=1, overlap=0, overhead=seconds, measured=("card", "cluster", "overhead"))`.

    Raises ValueError on sizes below 1, a layout of other ranks than cards or one that `spec` doesn't allow, unknown
    dtypes and modes.
    """
    layout.check(spec)
    if layout.world_size != cluster.cards:
        raise ValueError(f"{layout.degrees} is a layout of {layout.world_size} ranks, and {cluster.name} has "
                         f"{cluster.cards} cards: one for each rank is wanted")
    layers = Layers(spec, layout, cluster, speeds or Speeds(), whole("batch", batch), whole("seq", seq), dtype,
                    arithmetic or dtype, handed or dtype,
                    recompute if recompute == "light" else recompute_mode(recompute))
    passes = stage_passes(layers, stages_of(spec, layout.stages, weights))
    if layout.pp == 1:
        return _priced(layers, passes, ((),), None)
    orders = _orders(layout.kind, layout.pp, layout.microbatches, layout.chunks)
    line = timeline(orders, [times_of(each, layers.speeds) for each in passes], layers.seconds(layers.hop()))
    return _priced(layers, passes, orders, line)


def implied_share(seconds: float, spec: ModelSpec, layout: Layout, cluster: ClusterSpec, *,
                  speeds: Speeds | None = None, **how: Any) -> float:
    """The share of the peak at which `step_time`, given `how`, says that a step takes `seconds`: what a measured step
    or a published one says of the arithmetic, all else as assumed. Raises ValueError where it takes longer than that at
    the whole peak."""
    given = speeds or Speeds()

    def at(inverse: float) -> float:
        return step_time(spec, layout, cluster, speeds=replace(given, share=1 / inverse), **how).seconds

    (one, first), (other, second) = ((inverse, at(inverse)) for inverse in (1.0, 2.0))
    if number("seconds", seconds) < first:
        raise ValueError(f"{seconds:.4g} s: a step takes {first:.4g} s at the whole peak, for other parameters")
    for _ in range(6):  # seconds grow nearly in a straight line with 1 / share
        if abs(second - seconds) <= 1e-6 * seconds or first == second:
            break
        one, first, other = other, second, max(1.0, other + (seconds - second) * (other - one) / (second - first))
        second = at(other)
    return 1 / other


@lru_cache(maxsize=8)
def _orders(kind: str, ranks: int, microbatches: int, chunks: int) -> Orders:
    """The schedule's lists, which layouts that differ in other cuts have in common; made in seconds, if they are long.
    """
    orders = Layout(pp=ranks, schedule=kind, microbatches=microbatches, chunks=chunks).orders
    assert orders is not None
    return orders


def stage_passes(layers: Layers, stages: Sequence[Stage]) -> list[Pass]:
    """What one micro-batch takes of each stage."""
    kinds = layers.kinds()
    return [kinds.together(shape_of(stage, layers.spec)) for stage in stages]


def times_of(one: Pass, speeds: Speeds) -> Times:
    """Seconds of a stage's passes. In a pair the experts' messages hide behind the arithmetic, which lends a part of
    the card to them."""
    both = None
    if messages := one.ep + one.ep_back:
        arithmetic = (one.forward + one.input + one.weight + one.again) / (1 - speeds.lent)
        rest = one.tp + one.tp_back + one.cp + one.cp_back
        both = min(arithmetic + rest + messages - min(speeds.paired * messages, arithmetic),
                   one.ahead + one.back + one.weight)
    return Times(one.ahead, one.back, one.weight, both=both)


def _priced(layers: Layers, passes: Sequence[Pass], orders: Orders, line: Timeline | None) -> StepTime:
    """The bill: what ranks do on average, and what they wait for."""
    layout, m = layers.layout, layers.layout.microbatches
    done = [Counter(action.stage for action in order if action.kind == "F") for order in orders] if line else [{0: m}]
    n = len(done)
    ranks = [reduce(Pass.plus, (passes[stage] for stage in mine)) for mine in done]
    sums = [reduce(lambda sofar, item: sofar.plus(passes[item[0]], item[1]), mine.items(), Pass()) for mine in done]
    mean = Pass(*[sum(values) / n for values in zip(*sums, strict=True)])
    busy = line.busy if line else [mean.ahead + mean.back + mean.weight]
    total = line.total if line else busy[0]
    ends = [ending(layers, held, m, _table(layers, mine)) for held, mine in zip(ranks, done, strict=True)]
    over = [line.spans[r][-1].end if line else total for r in range(n)]
    data = max(when + end.data for when, end in zip(over, ends, strict=True)) - total
    average = sum(busy) / n
    arithmetic = mean.forward + mean.input + mean.weight
    parts = {"arithmetic": arithmetic, "computed again": mean.again, "tensor axis": mean.tp + mean.tp_back,
             "context axis": mean.cp + mean.cp_back}
    parts["experts' messages"] = average - sum(parts.values()) if mean.ep else 0.0
    parts |= {"imbalance": max(busy) - average, "bubble": total - max(busy), "data axis": data,
              "optimizer": max(end.optimizer for end in ends)}
    sent = {axis: (getattr(mean, f"{axis}_inside"), getattr(mean, f"{axis}_between")) for axis in AXES}
    hops = layers.hop().times(2 * m * (layout.stages - 1) / n)
    most = max(ends, key=lambda end: end.sent.inside + end.sent.between).sent
    sent |= {"pp": (hops.inside, hops.between), "data": (most.inside, most.between)}
    return StepTime(layers, tuple(passes), parts, sent, line)


def _table(layers: Layers, mine: dict[int, int]) -> bool:
    """Whether the rank has one of two copies of a tied embedding."""
    ends = {0, layers.layout.stages - 1}
    return layers.spec.tied and len(ends) > 1 and len(ends & mine.keys()) == 1
