"""All cuts of a `Layout`, each on its own axis of the mesh, in the one order in which they go together.

Each cut takes what the ones before it have left: tensor parallelism the plain layers, experts what of them it has cut
or left whole, the context attention as it then is, the pipeline some of these layers away. The data axis comes last: it
lays out what the rank then holds. The optimizer is made before that, of the parameters that there are by then, and ZeRO
puts slices in their place; without ZeRO, weights of 16 bits get float32 copies then (`masters`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..model.transformer import Transformer
from ..specs import Layout
from ..specs.rows import BUCKET
from ..specs.stages import split
from . import context, data, expert, grads, masters, mesh, pipeline, tensor, zero

__all__ = ["Axes", "Cut", "axes_of", "cut"]

MakeOptimizer = Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]


class Axes(NamedTuple):
    """This rank's groups, None for an axis of one rank. `data` takes in those of dp and cp: all ranks with tokens of
    their own. `ep` shares out experts, and the ranks of `replicas` have the same ones."""

    pp: dist.ProcessGroup | None = None
    data: dist.ProcessGroup | None = None
    cp: dist.ProcessGroup | None = None
    tp: dist.ProcessGroup | None = None
    ep: dist.ProcessGroup | None = None
    replicas: dist.ProcessGroup | None = None


class Cut(NamedTuple):
    """The cut model, the optimizer of what this rank holds, None where none was asked for, and the rank's groups."""

    model: Transformer
    optimizer: torch.optim.Optimizer | None
    axes: Axes


def cut(model: Transformer, layout: Layout, optimizer: MakeOptimizer | None = None, *,
        weights: Sequence[float] | None = None, bucket_bytes: int = BUCKET) -> Cut:
    """Lay the plain `model` out over all ranks, in place.

    Every rank calls it, with the same whole weights or on the meta device, to be filled by `weights.load`. `optimizer`
    makes one of a list of parameters: `functools.partial(torch.optim.AdamW, lr=1e-3)`. Then `train.train`, with the
    axes' `data` and the layout's `orders`; or, without a pipeline, backward, `grads.finish`, clip and step by hand.
    `weights` say how much each layer weighs for `specs.stages.split`, `bucket_bytes` how large the data axis' rows are.

    Raises ValueError before anything is cut where the layout is for another number of ranks, where the model does not
    allow it or is cut already, where ZeRO has no optimizer to share out, on `weights` that are not the layers', and for
    DualPipe, which has each stage on two ranks.
    """
    layout.check(model.spec)
    if any(hasattr(model, axis) for axis in ("reducer", "pipeline", "context")) or grads.marks(model):
        raise ValueError("this model is cut already: cut the plain one, by all axes at once")
    split(len(model.layers), layout.stages, weights)
    if layout.zero and optimizer is None:
        raise ValueError(f"zero = {layout.zero} shares out the optimizer's states: give the optimizer, as a function "
                         "of a list of parameters, such as functools.partial(torch.optim.AdamW, lr=1e-3)")
    if layout.pp > 1 and layout.kind == "dualpipe":
        raise ValueError("dualpipe has each stage on two ranks, two copies of the model: it is priced and drawn here, "
                         "and dualpipe_v runs, as well and with one copy")
    axes = axes_of(layout)
    if axes.tp is not None:
        tensor.cut(model, axes.tp, layout.sp, layout.etp)
    if axes.ep is not None:
        expert.cut(model, axes.ep, axes.replicas)
    if axes.cp is not None:
        context.cut(model, axes.cp)
    if axes.pp is not None:
        pipeline.cut(model, axes.pp, layout.orders, weights)
    # PyTorch makes no optimizer of no parameters, which a rank may have that holds nothing but padding
    made = None if optimizer is None else optimizer(list(model.parameters()) or [{"params": []}])  # type: ignore
    if axes.data is not None and layout.zero and made is not None:
        zero.shard(model, made, axes.data, layout.zero, bucket_bytes)
    elif axes.data is not None:
        data.replicate(model, axes.data, bucket_bytes)
    if made is not None and not layout.zero and any(each.dtype in masters.LOW for each in model.parameters()):
        masters.keep(model, made)
    return Cut(model, made, axes)


def axes_of(layout: Layout) -> Axes:
    """This rank's groups of the layout. Every rank calls it; called again, it gives the same ones. Raises ValueError
    where the layout is for another number of ranks."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if layout.world_size != ranks:
        raise ValueError(f"{layout.degrees} is a layout of {layout.world_size} ranks, and there are {ranks}: make "
                         f"pp · dp · cp · tp = {ranks}")
    sizes = {"pp": layout.pp, "dp": layout.data_ranks, "tp": layout.tp}
    found = _groups({axis: sizes[axis] for axis in layout.order.split("-")})
    if layout.cp > 1:
        found["cp"] = _groups(layout.axes)["cp"]
    if layout.ep > 1:
        parts = {"pp": layout.pp, "edp": layout.expert_replicas, "ep": layout.ep, "etp": layout.expert_tp}
        if layout.order.endswith("pp"):
            parts = {"edp": layout.expert_replicas, "ep": layout.ep, "etp": layout.expert_tp, "pp": layout.pp}
        among = _groups(parts)
        found |= {"ep": among["ep"], "replicas": among.get("edp")}
    return Axes(found.get("pp"), found.get("dp"), found.get("cp"), found.get("tp"), found.get("ep"),
                found.get("replicas"))


def _groups(sizes: dict[str, int]) -> dict[str, dist.ProcessGroup | None]:
    """This rank's group on each axis of more than one rank, the last axis over neighbours."""
    wide = {axis: size for axis, size in sizes.items() if size > 1}
    return {axis: mesh.build(**wide).get_group(axis) for axis in wide}
