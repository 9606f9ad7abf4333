"""What each rank hands to its collectives in one step: forward passes, backward passes, and what follows them.

Exact in payload, call by call, for what the cuts in `parallel` do; `tensor_traffic`, `context_traffic`,
`expert_traffic` and `data_traffic` have the calls of each axis.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from ..specs import Dtype, Layout, ModelSpec, dtype_of
from ..specs.check import flag, recompute_mode, whole
from ..specs.layout import staged
from ..specs.rows import BUCKET
from ..specs.units import binary
from .bill import Bill, Row
from .collective import Collective, Phase
from .context_traffic import ContextAxis
from .data_rows import DataRows
from .data_traffic import DataAxis
from .expert_traffic import ExpertAxis, Routed, busiest, check_routed, even_rows, loads, rows_of
from .parameters import parameters_of
from .places import within
from .sharing import rank_of
from .tensor_traffic import TensorAxis


@dataclass(frozen=True, repr=False)
class TrafficBill(Bill):
    """The collectives of one step on one rank: on each alike, but for what `rank` says. Sums take the ops, phases and
    axes to count; None is all.

    `batch` sequences a rank has in each of the `accumulate` passes of a step.
    """

    spec: ModelSpec
    layout: Layout
    batch: int
    seq: int
    dtype: Dtype
    collectives: tuple[Collective, ...]
    recompute: str | None = None
    accumulate: int = 1

    def where(self, op: str | None = None, phase: Phase | None = None, axis: str | None = None) -> list[Collective]:
        """The collectives of that op, phase and axis."""
        return [c for c in self.collectives
                if op in (None, c.op) and phase in (None, c.phase) and axis in (None, c.axis)]

    def total(self, op: str | None = None, phase: Phase | None = None, axis: str | None = None) -> int:
        """Payload: bytes that a rank hands to its collectives."""
        return sum(c.count * c.payload for c in self.where(op, phase, axis))

    def count(self, op: str | None = None, phase: Phase | None = None, axis: str | None = None) -> int:
        """Number of calls."""
        return sum(c.count for c in self.where(op, phase, axis))

    def wire(self, op: str | None = None, phase: Phase | None = None, axis: str | None = None) -> float:
        """Bytes that a rank sends if rings do it (derived)."""
        return sum(c.count * c.wire for c in self.where(op, phase, axis))

    def hops(self, op: str | None = None, phase: Phase | None = None, axis: str | None = None) -> int:
        """Messages that follow one another if rings do it, one call after the other."""
        return sum(c.count * c.hops for c in self.where(op, phase, axis))

    @property
    def title(self) -> str:
        again = f", {self.recompute} recomputation" if self.recompute else ""
        times = f"{self.accumulate} × " if self.accumulate > 1 else ""
        return (f"{self.spec.name}, {self.layout.degrees}, {times}{self.batch} × {self.seq} tokens, {self.dtype.name}"
                f"{again}: handed to collectives by each rank")

    @property
    def rows(self) -> list[Row]:
        axes = {c.axis for c in self.collectives}
        rows = [Row(f"{c.axis}, " * (len(axes) > 1) + f"{c.phase}, {c.what}", f"{c.count} {c.op} × {c.derivation}",
                    c.count * c.payload, note=f"wire {binary(c.count * c.wire)}") for c in self.collectives]
        total = f"{self.count()} collectives, {self.hops():,} messages one after another"
        return [*rows, Row("total", total, self.total(), note=f"wire {binary(self.wire())}")]

    @property
    def footnotes(self) -> list[str]:
        alone = ", an all-to-all pair by pair" if any(c.op == "all_to_all" for c in self.collectives) else ""
        return [f"wire: what each rank sends if a ring does it{alone}; derived"] if self.collectives else []

    def to_dict(self) -> dict[str, Any]:
        """The bill as plain data: inputs, every collective with payload, wire and hops of one call, rows."""
        calls = [asdict(c) | {"wire": c.wire, "hops": c.hops} for c in self.collectives]
        inputs = {"model": self.spec.name, **asdict(self.layout), "batch": self.batch, "seq": self.seq,
                  "dtype": self.dtype.name, "recompute": self.recompute, "accumulate": self.accumulate}
        return {**inputs, "collectives": calls, "payload": self.total(), "wire": self.wire(), **super().to_dict()}


def traffic(spec: ModelSpec, layout: Layout, batch: int, seq: int, dtype: str = "fp32", backward: bool = True,
            head: Literal["loss", "logits"] = "loss", recompute: str | None = None, *, accumulate: int = 1,
            frozen: Collection[str] = (), rank: int | None = None, start: bool = False, clip: bool = False,
            loop: bool = False, bucket: int = BUCKET, routed: Routed | Literal["even"] | None = None) -> TrafficBill:
    """The bill of one step on `batch` × `seq` tokens a rank: a forward pass to the `head`, and `backward` from it.

    `head` "loss" ends in the vocabulary-parallel cross-entropy, "logits" in gathering the logits on every rank:
    `traffic(spec, layout, 1, 1, backward=False, head="logits")` is one token of generation. One rank has no traffic.
    `recompute` None, "selective" or "full" is the model's: what backward computes again, with its collectives.

    With `backward` comes what ends a step: `grads.finish`, and behind the optimizer's step what ZeRO gathers.
    `accumulate` passes of so many tokens each make a step, all but the last under `no_sync`. `frozen` names weights
    that are not trained, or modules of them. `start` adds what `data.replicate` or `zero.shard` sends at the start,
    `clip` the norm of the gradients, `loop` all that `train.step` sends besides. `bucket` is the bytes of a row of
    gradients. Ranks that ZeRO leaves different parts of a gradient may hand in different amounts: the bill is `rank`'s,
    with None that of the one that hands in most.

    Where cp cuts sequences, `seq` is the whole length, and the data axis has dp · cp ranks. Where ep shares out
    experts, what travels depends on the router: `routed[r]` is what rank r has chosen, its `Routing.counts` in each
    pass through a layer with experts; "even" is the bill of experts that are asked for alike.

    Raises ValueError on sizes below 1, an unknown dtype, head or mode, a rank or a frozen name that there isn't, on a
    layout that the model doesn't allow, and on what is not known here: what the plain model hasn't got, and tp for a
    model that is no Llama.
    """
    if head not in ("loss", "logits"):
        raise ValueError(f"unknown head {head!r}: use loss or logits")
    layout, kept = staged(layout), dtype_of(dtype)
    layout.check(spec)
    _check_known(spec, layout)
    for name, choice in (("backward", backward), ("start", start), ("clip", clip), ("loop", loop)):
        flag(name, choice)
    whole("batch", batch), whole("seq", seq), whole("accumulate", accumulate)
    again, passes = recompute_mode(recompute), accumulate
    number = None if rank is None else within(layout, rank_of(rank, layout))
    coordinate = None if number is None else number // layout.tp
    held = parameters_of(spec, layout, frozen, rank or 0)
    data = DataAxis(DataRows(held.apart()[0], layout, spec.tied, kept.bytes, whole("bucket", bucket)), passes)
    context = ContextAxis(spec, held, layout, batch, seq, kept)
    tensor = TensorAxis(spec, held, layout, context.tokens, kept)
    experts = _experts(context, routed, passes, frozen, number) if layout.ep > 1 else None
    calls: list[Collective] = []
    if experts is not None:
        calls += [*(experts.start(experts.parameters) if start else ()), *experts.forward()]
        calls += experts.backward(again == "full") if backward else []
    if layout.data_ranks > 1:
        calls += [*(data.start() if start else ()), *(data.loop() if loop else ()), *data.forward()]
        calls += loads(spec, "dp", layout.data_ranks) if loop else ()
    one: list[Collective] = []
    if layout.cp > 1:
        one += [*context.forward(), *(context.logits() if head == "logits" else ())]
        one += context.backward(again) if backward else []
    if layout.tp > 1:
        one += [*tensor.forward(), *(tensor.loss() if head == "loss" else tensor.logits())]
        one += tensor.backward(again == "full") if backward else []
    calls += [replace(call, count=call.count * passes) for call in one]
    if backward:
        calls += _ending(data, tensor, experts, coordinate, clip or loop)
    return TrafficBill(spec, layout, batch, seq, kept, tuple(merged(calls)), recompute, passes)


def heads_traffic(spec: ModelSpec, layout: Layout, batch: int, seq: int, dtype: str = "fp32", backward: bool = True
                  ) -> TrafficBill:
    """What the context axis would send for attention that is cut by heads and not in a ring (Ulysses, arXiv:2309.14509,
    §3.1): four all-to-alls a layer each way. A formula with no run behind it; for the ring, take the calls of the axis
    "cp" of `traffic`. Raises ValueError where the ranks don't share out the heads, on windowed and on compressed
    attention, and as `traffic` does."""
    layout, kept = staged(layout), dtype_of(dtype)
    layout.check(spec)
    if spec.beyond_plain:
        raise ValueError(f"{spec.name} has {spec.beyond_plain}: the traffic of the plain model alone is known")
    axis = ContextAxis(spec, parameters_of(spec, layout), layout, whole("batch", batch), whole("seq", seq), kept)
    axis.check_heads()
    calls = [*axis.heads("forward"), *(axis.heads("backward") if flag("backward", backward) else ())]
    return TrafficBill(spec, layout, batch, seq, kept, tuple(calls if layout.cp > 1 else ()))


def _check_known(spec: ModelSpec, layout: Layout) -> None:
    other = spec.beyond_llama if layout.tp > 1 else spec.beyond_plain
    if other:
        kind = "over a tensor axis the traffic of the Llama kind" if layout.tp > 1 else "the traffic of the plain model"
        raise ValueError(f"{spec.name} has {other}: {kind} alone is known")


def _experts(whole: ContextAxis, routed: Routed | Literal["even"] | None, passes: int, frozen: Collection[str],
             number: int | None) -> ExpertAxis:
    """The expert axis of the rank of that number, or of the one that sends most."""
    spec, layout = whole.spec, whole.layout
    if routed == "even":
        assert spec.experts is not None
        times = passes * (spec.layers - spec.experts.first_dense)
        return ExpertAxis(spec, parameters_of(spec, layout, frozen, number or 0).apart()[1], layout,
                          [even_rows(spec, layout, whole.tokens)] * times, whole.dtype)
    routed = check_routed(spec, layout, routed, passes)
    ranks = range(layout.world_size) if number is None else (number,)
    return busiest([ExpertAxis(spec, parameters_of(spec, layout, frozen, r).apart()[1], layout,
                               list(rows_of(routed, layout, r)), whole.dtype) for r in ranks])


def _ending(data: DataAxis, tensor: TensorAxis, experts: ExpertAxis | None, coordinate: int | None, clip: bool
            ) -> Iterator[Collective]:
    """What the data axis does in backward, and what comes behind it."""
    layout = tensor.layout
    if layout.data_ranks > 1:
        yield from (*data.backward(), *data.finish())
    if experts is not None:
        yield from experts.finish()
    if layout.tp > 1:
        yield from tensor.finish(*data.summed(coordinate))
    if clip:
        yield from (*tensor.clip(), *data.clip(), *(experts.clip() if experts is not None else ()))
    if layout.data_ranks > 1:
        yield from data.step()


def merged(calls: Iterable[Collective]) -> Iterator[Collective]:
    """Equal calls in one line, none where there is no call."""
    counts: dict[Collective, int] = {}
    for call in calls:
        one = replace(call, count=1)
        counts[one] = counts.get(one, 0) + call.count
    return (replace(call, count=n) for call, n in counts.items() if n)
