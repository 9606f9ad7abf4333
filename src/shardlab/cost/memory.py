"""What each rank holds: bytes of weights, gradients and optimizer states.

Exact, padding and copies included, for what `parallel.tensor.cut`, `expert.cut`, `pipeline.cut`, `data.replicate` and
`zero.shard` leave on a rank: the shapes come from `TensorSpec.local_shape`, the rows from `specs.rows`, the stages from
`specs.stages`. `training` and `serving` add what is held beside these states.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from ..specs import Format, Layout, ModelSpec, format_of
from ..specs.check import flag, whole
from ..specs.layout import layout_of
from ..specs.model import GROUPS
from ..specs.rows import BUCKET
from .data_rows import DataRows
from .formats import Formats, formats_of
from .memory_bill import OPTIMIZERS, MemoryBill
from .parameters import held_by_each, parameters_of, together
from .places import Place, alone, places, rank_at, within
from .sharing import Share, held_of, left, rank_of, share


def memory(spec: ModelSpec, layout: Layout | None = None, dtype: str = "fp32", training: bool = False,
           optimizer: str = "adamw", master: str | None = None, gradients: str | None = None, *,
           frozen: Collection[str] = (), rank: int | None = None, bucket: int = BUCKET, redundant: int = 0,
           share_experts: bool = False, weights: Sequence[float] | None = None) -> MemoryBill:
    """The bill of what each rank holds of `spec` under `layout` (one rank if None), weights stored as `dtype`.

    `training` adds gradients and the states of `optimizer`: "adamw", "sgd" or "sgd+momentum", as PyTorch keeps them.
    `master="fp32"` is mixed precision: the optimizer steps a copy of the weights in fp32 and has its moments so. Then
    bf16 takes 16 bytes a parameter, 2 + 2 + 4 + 8 (ZeRO, arXiv:1910.02054, §3.1), and 18 with `gradients="fp32"`
    (Megatron-LM's main gradients). Weights in `master`'s own format are the master weights, and have no copy.

    ZeRO shares out rows of `bucket` bytes of gradients. Under it half precision is always stepped in fp32, and a rank's
    part of the gradients summed up in fp32, as `zero.shard` does; `gradients="bf16"` keeps them so, as the paper
    counts. `frozen` names weights that are not trained, or modules of them. Where ranks differ, as those of a pipeline
    do, the bill is that of `rank`, or of the one that holds most; a pipeline's stages get layers by `weights`
    (`specs.stages.split`).

    Of a mixture's experts a rank holds one of ep parts, cut over etp ranks. `zero.shard` leaves these as they are;
    `share_experts` is the bill of one that shares them out over the ranks with the same ones, as DeepSeek's and
    Megatron's do (no run of ours is behind it). Serving may add `redundant` copies of experts to each layer.

    Raises ValueError on an unknown format or optimizer, on quantised weights to be trained or shared out, on copies
    that are trained, on a frozen name or a rank that there isn't, and on a layout that `spec` doesn't allow.
    """
    layout = layout_of(layout)
    layout.check(spec, redundant)
    states = states_of(spec, layout, dtype, training, optimizer, master, gradients, frozen=frozen, bucket=bucket,
                       redundant=redundant, share_experts=share_experts)
    where = places(spec, layout, weights)
    if rank is not None:
        return states.of(where[layout.place(rank_of(rank, layout))["pp"]], within(layout, rank))
    return max(map(states.of, where), key=lambda bill: bill.held)


def states_of(spec: ModelSpec, layout: Layout, dtype: str, training: bool, optimizer: str, master: str | None,
              gradients: str | None, *, frozen: Collection[str] = (), bucket: int = BUCKET, redundant: int = 0,
              share_experts: bool = False) -> States:
    """What `memory` is asked for, of any place. Raises ValueError as it does, but on a layout."""
    flag("training", training)
    if not isinstance(optimizer, str) or optimizer not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {optimizer!r}: use one of {', '.join(OPTIMIZERS)}")
    form = format_of(dtype)
    if redundant and (training or layout.zero):
        raise ValueError(f"redundant = {redundant}: copies of experts are for serving; training has its gradients to "
                         "sum, which a smaller ep does: leave redundant out")
    if not training and (master is not None or gradients is not None):
        raise ValueError(f"master = {master!r} and gradients = {gradients!r} are held in training: training=True")
    if (training or layout.zero) and not form.matrix == form.expert == form.rest:
        raise ValueError(f"weights stored as {form.name} are served, not trained here: train with fp32, bf16 or fp16")
    formats = formats_of(form, master, gradients, layout.zero > 0) if training else None
    return States(spec, layout, form, optimizer if training else None, formats, frozen, whole("bucket", bucket),
                  redundant, flag("share_experts", share_experts))


@dataclass(frozen=True)
class States:
    """What is held of `spec` under `layout`, and in which formats: of the ranks at any place of its pipeline."""

    spec: ModelSpec
    layout: Layout
    form: Format
    optimizer: str | None
    formats: Formats | None
    frozen: Collection[str]
    bucket: int
    redundant: int
    share_experts: bool

    def of(self, place: Place, number: int | None = None) -> MemoryBill:
        """The bill of the rank that has this number at the place, with None that of the one that holds most."""
        elements, tensors, stored = dict.fromkeys(GROUPS, 0), dict.fromkeys(GROUPS, 0), dict.fromkeys(GROUPS, 0)
        there, copied = 0, 0
        for tensor, in_all, times, shape, numbers in held_by_each(self.spec, self.layout, self.redundant, place.stages):
            group = tensor.group
            elements[group] += times * math.prod(shape)
            tensors[group] += times
            stored[group] += times * self.form.of(group, shape).nbytes(shape)
            there += in_all * tensor.size
            copied += numbers - in_all * tensor.size
        held = sum(elements.values())
        padding = together(self.layout) * held - there - copied
        bill = MemoryBill(self.spec, self.layout, self.form, self.optimizer, self.formats, elements, tensors, stored,
                          copied, padding, Share(held, 0, 0, 0, 0), 0, self.redundant, place)
        if self.layout.zero or self.frozen:
            bill, number = self._shared_out(bill, number)
        else:
            biases, routers = bill.untrained
            stepped, pieces = held - biases, sum(tensors.values()) - routers
            bill = replace(bill, share=Share(held, stepped, 0, stepped, pieces))
        return replace(bill, rank=rank_at(self.layout, place.number, number or 0))

    def _shared_out(self, bill: MemoryBill, number: int | None) -> tuple[MemoryBill, int | None]:
        """The bill of a rank that ZeRO leaves a part, of spread experts too or not, or that does not train what is
        frozen; and which it is."""
        layout, formats, place = alone(self.layout), self.formats, bill.place
        if number is None and layout.ep > 1 and (one := [name for name in self.frozen
                                                         if re.search(r"experts\.\d", name)]):
            raise ValueError(f"{one[0]} is on some of the ranks only, ep = {layout.ep}: say whose bill with rank=")
        rest, spread = parameters_of(self.spec, layout, self.frozen, number or 0, place.stages).apart()
        rows = [DataRows(some, layout, self.spec.tied, bill.width, self.bucket, place.apart)
                for some in (rest, spread if self.share_experts else ()) if some]
        converted = formats is not None and formats.part != formats.gradients
        if number is None and layout.zero:
            kept = [(bill.kept[0], formats.stepped), (1, bill.master), (converted, formats.part)] if formats else []
            wide = sum(n * dtype.bytes for n, dtype in kept if dtype)
            most = [(each, held_of(each.gradients, each.ranks, wide, bill.kept[1])) for each in rows]
            number = max(range(layout.stage_ranks), key=lambda r: sum(n[each.coordinate(r)] for each, n in most))
        shares = [share(each, each.coordinate(number or 0), converted) for each in rows]
        if not self.share_experts:
            shares.append(left(spread, converted and layout.zero > 0))
        return replace(bill, share=reduce(Share.plus, shares, Share(0, 0, 0, 0, 0))), number
