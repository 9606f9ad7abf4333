"""What a training step holds on each rank: states, what autograd keeps, the peak of the loss, and buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..specs import Layout, ModelSpec
from ..specs.layout import layout_of
from ..specs.rows import BUCKET
from ..specs.units import count, decimal, parse_bytes
from .activations import activations
from .data_rows import DataRows
from .memory import memory
from .memory_bill import MemoryBill, Part
from .parameters import parameters_of
from .pipeline import pipeline
from .pipeline_bill import RankBill
from .under_way import under_way

RESERVE = "1 GiB"
ASSUMED = "assumed: CUDA context, workspaces, buffers of collectives"


def training(spec: ModelSpec, layout: Layout | None = None, *, batch: int, seq: int, dtype: str = "bf16",
             master: str | None = "fp32", optimizer: str = "adamw", gradients: str | None = None,
             recompute: str | None = None, reserve: str = RESERVE, rank: int | None = None,
             share_experts: bool = False, weights: Sequence[float] | None = None) -> MemoryBill:
    """The bill of a training step on `batch` × `seq` tokens a rank: `memory`'s states and, as parts, "activations"
    (what autograd keeps of the layers and ends when the forward pass is over), what comes to it at the worst moment,
    "logits" (the loss, over logits in fp32) or "a layer again" (computed again), under ZeRO-2 and 3 what is "under way"
    (whole rows of gradients and units of weights, at their worst moment), and "buffers" (`reserve`, an assumption).

    With a pipeline it is the bill of `rank`, with None of the one that holds most, for micro-batches of `batch`
    sequences; activations are of as many as its schedule keeps at a time. `cost.pipeline` has them all.

    `dtype`, `master`, `optimizer`, `gradients`, `share_experts` and `weights` as in `memory`: the defaults are bf16
    mixed. Activations are those of GPU kernels. Gradients on their way through a layer are not counted, nor what the
    allocator loses between blocks. Raises ValueError as `memory`, `activations` and `pipeline` do, and on a reserve
    that is no size.
    """
    layout = layout_of(layout)
    layout.check(spec)
    if spec.learned_positions and seq > spec.max_positions:
        raise ValueError(f"{spec.name} has learned {spec.max_positions:,} positions, too few for {seq:,} tokens")
    parts: list[Part] = []
    if layout.pp > 1:
        all_ = pipeline(spec, layout=layout, batch=batch, seq=seq, dtype=dtype, recompute=recompute, weights=weights,
                        optimizer=optimizer, master=master, gradients=gradients, device="cuda",
                        share_experts=share_experts)
        one = all_.largest if rank is None else all_.at(rank)
        rank, parts = one.number, list(_kept(one))
    bill = memory(spec, layout, dtype, True, optimizer, master, gradients, rank=rank, share_experts=share_experts,
                  weights=weights)
    if layout.pp == 1:
        kept = activations(spec, layout, batch=batch, seq=seq, dtype=dtype, recompute=recompute, device="cuda")
        loss = kept.saved.logits()
        worst, how = (("logits", loss.derivation) if kept.logits >= kept.recomputed else
                      ("a layer again", "computed again"))
        parts = [Part("activations", kept.layers + kept.ends, f"{spec.layers} layers × {kept.per_layer:,} B + ends"),
                 Part(worst, kept.peak - kept.layers - kept.ends, how)]
    if layout.zero > 1:
        parts.append(_under_way(bill))
    parts.append(reserved(reserve))
    times = f"{layout.microbatches} × " if layout.pp > 1 else ""
    how = f"{times}{batch} × {seq:,} tokens, {bill.format.name}" + (f" with {master} master weights" if master else "")
    task = f"a training step, {how}, {optimizer}, {recompute or 'no'} recomputation"
    return replace(bill, parts=tuple(parts), task=task)


def _kept(rank: RankBill) -> Iterator[Part]:
    """What a rank of a pipeline keeps at most between two actions, and what comes to it inside of one."""
    stages = {each.stage.number: each for each in rank.stages}
    some = [f"{n} × {decimal(stages[stage].kept)}" for stage, n in rank.live.items()]
    some += [f"{n} × {decimal(stages[stage].put_off)} put off" for stage, n in rank.late.items()]
    yield Part("activations", rank.activations, "micro-batches: " + " + ".join(some))
    if rank.peak > rank.activations:
        yield Part("within a pass", rank.peak - rank.activations, "the loss, or a layer computed again")


def _under_way(bill: MemoryBill) -> Part:
    """What ZeRO-2 and 3 have whole for a moment, beside a rank's share; spread experts it leaves as they are."""
    layout, spec = bill.layout, bill.spec
    rest, _ = parameters_of(spec, layout).apart()
    weights, gradients = under_way(DataRows(rest, layout, spec.tied, bill.width, BUCKET))
    numbers = f"{count(gradients)} numbers of gradients"
    if weights:
        numbers = f"({count(weights)} numbers of weights + {count(gradients)} of gradients)"
    return Part("under way", (weights + gradients) * bill.width, f"{numbers} × {bill.width} B ({bill.format.name})")


def reserved(reserve: str) -> Part:
    """What no formula here gives: the part that is set aside for it."""
    return Part("buffers", parse_bytes(reserve), ASSUMED)
