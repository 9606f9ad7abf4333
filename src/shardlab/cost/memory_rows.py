"""A bill of memory, line by line."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..specs import Dtype, Layout, ModelSpec
from ..specs.storage import Packed
from ..specs.units import count, decimal
from .bill import Row
from .parameters import held_by_each, together

if TYPE_CHECKING:
    from .memory_bill import MemoryBill


def title_of(bill: MemoryBill) -> str:
    """Of which model, on how many ranks, and what for."""
    n = bill.layout.world_size
    if bill.layout.pp > 1:
        ranks = f"on rank {bill.rank} of {n} ({bill.layout.degrees}), with {bill.place.what}"
    else:
        ranks = f"on each of {n} ranks ({bill.layout.degrees})" if n > 1 else "on one rank"
    task = bill.task or (f"trained with {bill.optimizer}" if bill.optimizer else "weights only")
    return f"{bill.spec.name}, {ranks}, {task}"


def rows_of(bill: MemoryBill) -> list[Row]:
    """Weights by group and in all, gradients, states, parts, and the sum."""
    held = sum(bill.elements.values())
    rows = [] if bill.layout.zero == 3 else [_group(bill, group) for group, n in bill.elements.items() if n]
    plain = bill.format.matrix == bill.format.expert == bill.format.rest
    width = f"{bill.format.rest.bits // 8} B" if plain else f"{bill.weights / held:.4f} B"
    numbers = bill.share.weights if bill.layout.zero else held
    params = f"{_part(bill.spec.total, numbers, bill.layout)} params × {width} ({bill.format.name})"
    active = bill.weights if bill.layout.zero == 3 else bill.active  # of slices nobody uses only some
    rows.append(Row("weights", params, bill.weights, note=_note(bill.weights, active, bill.spec)))
    for i, (n, dtype) in enumerate(bill.kept_gradients):
        rows.append(_numbers("gradients" + ", own part" * (i > 0), n, 1, dtype))
    if bill.master:
        rows.append(_numbers("master weights", bill.share.stepped, 1, bill.master))
    if bill.formats and bill.kept[0]:
        rows.append(_numbers("moments", bill.share.stepped, bill.kept[0], bill.formats.stepped))
    if bill.steps:
        what = "pieces of tensors" if bill.layout.zero else "tensors"
        rows.append(Row("steps", f"{bill.share.pieces} {what} × {bill.kept[1]} B (fp32)", bill.steps))
    rows += [Row(part.kind, part.derivation, part.nbytes) for part in bill.parts if part.on == "card"]
    rows.append(Row("each rank", " + ".join(r.label for r in rows if r.label[0] != " "), bill.per_rank))
    return rows + [Row(f"{part.kind}, host", part.derivation, part.nbytes) for part in bill.parts if part.on == "host"]


def notes_of(bill: MemoryBill) -> list[str]:
    """What ranks hold alike, and what more than the model they hold together."""
    layout = bill.layout
    if layout.world_size == 1:
        return []
    notes = [] if layout.zero == 0 else [
        f"Of {layout.data_ranks} ranks of the data axis, number {bill.coordinate}: others differ by padding and step "
        "counters."]
    if layout.tp > 1 or layout.spreads:
        model = "all of these stages" if layout.pp > 1 else "the whole model"
        whole = f"{together(layout)} ranks have {model}: of it"
        if layout.zero:
            of = whole if layout.spreads else "In all of a replica"
        else:
            at = " with these stages" if layout.pp > 1 else ""
            of = f"Every rank{at} holds " + (f"as much. {whole}" if layout.spreads else "the same. In all")
        notes.append(f"{of} {count(bill.copied)} numbers are copies of what another rank holds too, "
                     f"{count(bill.padding)} are padding.")
    return notes


def _numbers(label: str, n: int, kept: int, dtype: Dtype) -> Row:
    times = f"{kept} × " if kept > 1 else ""
    return Row(label, f"{count(n)} × {times}{dtype.bytes} B ({dtype.name})", n * kept * dtype.bytes)


def _group(bill: MemoryBill, group: str) -> Row:
    """The weights of one group: numbers × bytes, and scales × bytes, for each way that some of them are stored."""
    kinds: dict[Packed, list[int]] = {}
    for tensor, whole, times, shape, _ in held_by_each(bill.spec, bill.layout, bill.redundant, bill.place.stages):
        if tensor.group == group:
            packed = bill.format.of(group, shape)
            sums = kinds.setdefault(packed, [0, 0, 0])
            for i, n in enumerate((whole * tensor.size, times * math.prod(shape), times * packed.scales(shape))):
                sums[i] += n
    text = " + ".join(_stored_as(packed, sums, bill.layout) for packed, sums in kinds.items())
    stored = bill.stored[group]
    return Row(f"  {group}", text, stored, note=_note(stored, active_of(bill, group, stored), bill.spec))


def _part(whole: int, held: int, layout: Layout) -> str:
    cut = layout.tp > 1 or layout.spreads or layout.pp > 1
    return count(held) if not cut and whole == held else f"{count(whole)} → {count(held)}"


def _stored_as(packed: Packed, sums: list[int], layout: Layout) -> str:
    whole, held, scales = sums
    text = f"{_part(whole, held, layout)} × {packed.bits / 8:g} B ({packed.name})"
    return text + (f" + {count(scales)} scales × {packed.scale_bytes} B" if scales else "")


def active_of(bill: MemoryBill, group: str, nbytes: int) -> int:
    """What a token uses of `nbytes` of weights on a rank: of routed experts, those that it is sent to on average."""
    experts = bill.spec.experts
    if experts is None or group != "experts":
        return nbytes
    return nbytes * experts.active // (experts.routed + bill.redundant)


def _note(resident: int, active: int, spec: ModelSpec) -> str:
    return f"active {decimal(active)}" if spec.experts and active != resident else ""
