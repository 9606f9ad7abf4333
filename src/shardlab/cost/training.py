"""What a training step holds on each rank: states, what autograd keeps, the peak of the loss, and buffers."""

from __future__ import annotations

from dataclasses import replace

from ..specs import Layout, ModelSpec
from ..specs.layout import staged
from ..specs.rows import BUCKET
from ..specs.units import count, parse_bytes
from .activations import activations
from .data_rows import DataRows
from .memory import memory
from .memory_bill import MemoryBill, Part
from .parameters import parameters_of
from .under_way import under_way

RESERVE = "1 GiB"
ASSUMED = "assumed: CUDA context, workspaces, buffers of collectives"


def training(spec: ModelSpec, layout: Layout | None = None, *, batch: int, seq: int, dtype: str = "bf16",
             master: str | None = "fp32", optimizer: str = "adamw", gradients: str | None = None,
             recompute: str | None = None, reserve: str = RESERVE) -> MemoryBill:
    """The bill of a training step on `batch` × `seq` tokens a rank: `memory`'s states and, as parts, "activations"
    (what autograd keeps of the layers and ends when the forward pass is over), what comes to it at the worst moment,
    "logits" (the loss, over logits in fp32) or "a layer again" (computed again), under ZeRO-2 and 3 what is "under way"
    (whole rows of gradients and units of weights, at their worst moment), and "buffers" (`reserve`, an assumption).

    `dtype`, `master`, `optimizer` and `gradients` as in `memory`: the defaults are bf16 mixed. Activations are those of
    GPU kernels. Gradients on their way through a layer are not counted, nor what the allocator loses between blocks.
    Raises ValueError as `memory` and `activations` do, and on a reserve that is no size.
    """
    staged(layout).check(spec)
    if spec.learned_positions and seq > spec.max_positions:
        raise ValueError(f"{spec.name} has learned {spec.max_positions:,} positions, too few for {seq:,} tokens")
    bill = memory(spec, layout, dtype, True, optimizer, master, gradients)
    kept = activations(spec, bill.layout, batch=batch, seq=seq, dtype=dtype, recompute=recompute, device="cuda")
    loss = kept.saved.logits()
    worst, how = ("logits", loss.derivation) if kept.logits >= kept.recomputed else ("a layer again", "computed again")
    parts = [Part("activations", kept.layers + kept.ends, f"{spec.layers} layers × {kept.per_layer:,} B + ends"),
             Part(worst, kept.peak - kept.layers - kept.ends, how)]
    if bill.layout.zero > 1:
        parts.append(_under_way(bill))
    parts.append(reserved(reserve))
    how = f"{batch} × {seq:,} tokens, {bill.format.name}" + (f" with {master} master weights" if master else "")
    task = f"a training step, {how}, {optimizer}, {recompute or 'no'} recomputation"
    return replace(bill, parts=tuple(parts), task=task)


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
