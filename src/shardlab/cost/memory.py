"""What each rank holds: bytes of weights, gradients and optimizer states.

Exact, padding and copies included, for what `parallel.tensor.cut`, `expert.cut`, `data.replicate` and `zero.shard`
leave on a rank: the shapes come from `TensorSpec.local_shape`, the rows from `specs.rows`. `training` and `serving` add
what is held beside these states.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import replace
from functools import reduce

from ..specs import Layout, ModelSpec, format_of
from ..specs.check import flag, whole
from ..specs.layout import staged
from ..specs.model import GROUPS
from ..specs.rows import BUCKET
from .data_rows import DataRows
from .formats import formats_of
from .memory_bill import OPTIMIZERS, MemoryBill
from .parameters import held_by_each, parameters_of, together
from .sharing import Share, held_of, left, rank_of, share


def memory(spec: ModelSpec, layout: Layout | None = None, dtype: str = "fp32", training: bool = False,
           optimizer: str = "adamw", master: str | None = None, gradients: str | None = None, *,
           frozen: Collection[str] = (), rank: int | None = None, bucket: int = BUCKET, redundant: int = 0,
           share_experts: bool = False) -> MemoryBill:
    """The bill of what each rank holds of `spec` under `layout` (one rank if None), weights stored as `dtype`.

    `training` adds gradients and the states of `optimizer`: "adamw", "sgd" or "sgd+momentum", as PyTorch keeps them.
    `master="fp32"` is mixed precision: the optimizer steps a copy of the weights in fp32 and has its moments so. Then
    bf16 takes 16 bytes a parameter, 2 + 2 + 4 + 8 (ZeRO, arXiv:1910.02054, §3.1), and 18 with `gradients="fp32"`
    (Megatron-LM's main gradients). Weights in `master`'s own format are the master weights, and have no copy.

    ZeRO shares out rows of `bucket` bytes of gradients. Under it half precision is always stepped in fp32, and a rank's
    part of the gradients summed up in fp32, as `zero.shard` does; `gradients="bf16"` keeps them so, as the paper
    counts. `frozen` names weights that are not trained, or modules of them. Where ranks differ, the bill is that of
    `rank`, or of the one that holds most.

    Of a mixture's experts a rank holds one of ep parts, cut over etp ranks. `zero.shard` leaves these as they are;
    `share_experts` is the bill of one that shares them out over the ranks with the same ones, as DeepSeek's and
    Megatron's do (no run of ours is behind it). Serving may add `redundant` copies of experts to each layer.

    Raises ValueError on an unknown format or optimizer, on quantised weights to be trained or shared out, on copies
    that are trained, on a frozen name or a rank that there isn't, and on a layout that `spec` doesn't allow.
    """
    flag("training", training)
    if not isinstance(optimizer, str) or optimizer not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {optimizer!r}: use one of {', '.join(OPTIMIZERS)}")
    layout, form = staged(layout), format_of(dtype)
    layout.check(spec, redundant)
    if redundant and (training or layout.zero):
        raise ValueError(f"redundant = {redundant}: copies of experts are for serving; training has its gradients to "
                         "sum, which a smaller ep does: leave redundant out")
    if not training and (master is not None or gradients is not None):
        raise ValueError(f"master = {master!r} and gradients = {gradients!r} are held in training: training=True")
    if (training or layout.zero) and not form.matrix == form.expert == form.rest:
        raise ValueError(f"weights stored as {form.name} are served, not trained here: train with fp32, bf16 or fp16")
    formats = formats_of(form, master, gradients, layout.zero > 0) if training else None
    elements, tensors, stored = dict.fromkeys(GROUPS, 0), dict.fromkeys(GROUPS, 0), dict.fromkeys(GROUPS, 0)
    copied, most = 0, together(layout)
    for tensor, in_all, times, shape, there in held_by_each(spec, layout, redundant):
        group = tensor.group
        elements[group] += times * math.prod(shape)
        tensors[group] += times
        stored[group] += times * form.of(group, shape).nbytes(shape)
        copied += there - in_all * tensor.size
    numbers = sum(elements.values())
    bill = MemoryBill(spec, layout, form, optimizer if training else None, formats, elements, tensors, stored, copied,
                      most * numbers - spec.total - copied, Share(numbers, 0, 0, 0, 0),
                      0 if rank is None else rank_of(rank, layout), redundant)
    if not layout.zero and not frozen:
        biases, routers = bill.untrained
        stepped, pieces = numbers - biases, sum(tensors.values()) - routers
        return replace(bill, share=Share(numbers, stepped, 0, stepped, pieces))
    return _shared_out(bill, frozen, rank, whole("bucket", bucket), flag("share_experts", share_experts))


def _shared_out(bill: MemoryBill, frozen: Collection[str], rank: int | None, bucket: int, experts: bool) -> MemoryBill:
    """The bill of a rank that ZeRO leaves a part, of spread `experts` too or not, or that does not train what is
    frozen."""
    layout, formats = bill.layout, bill.formats
    if rank is None and layout.ep > 1 and (one := [name for name in frozen if re.search(r"experts\.\d", name)]):
        raise ValueError(f"{one[0]} is on some of the ranks only, ep = {layout.ep}: say whose bill with rank=")
    rest, spread = parameters_of(bill.spec, layout, frozen, bill.rank).apart()
    rows = [DataRows(some, layout, bill.spec.tied, bill.width, bucket) for some in (rest, spread if experts else ())
            if some]
    converted = formats is not None and formats.part != formats.gradients
    if rank is None and layout.zero:
        kept = [(bill.kept[0], formats.stepped), (1, bill.master), (converted, formats.part)] if formats else []
        number = sum(n * dtype.bytes for n, dtype in kept if dtype)
        held = [(each, held_of(each.gradients, each.ranks, number, bill.kept[1])) for each in rows]
        bill = replace(bill, rank=max(range(layout.world_size),
                                      key=lambda r: sum(most[each.coordinate(r)] for each, most in held)))
    shares = [share(each, each.coordinate(bill.rank), converted) for each in rows]
    if not experts:
        shares.append(left(spread, converted and layout.zero > 0))
    return replace(bill, share=reduce(Share.plus, shares))
