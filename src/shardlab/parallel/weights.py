"""Weights of a cut model from a Hugging Face folder and back: each rank reads what it holds, and one writes the whole.

    with torch.device("meta"):
        model = Transformer(ModelSpec.from_config(folder))      # no rank ever has it whole
    tensor.cut(model, tp)
    zero.shard(model, optimizer, dp, stage=3)
    weights.load(model, folder)

A rank may hold a window of a tensor (tensor parallelism), of which it holds a run of elements (ZeRO). Row by row that
run is a rectangle, with a part of a row before it and one behind it, and each of the three is read for itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..comm import ops
from ..model import checkpoint
from ..model.folders import is_full
from ..model.hf_config import config
from ..model.parameters import distinct, materialise
from ..model.transformer import Transformer
from . import grads, zero_state


@torch.no_grad()
def load(model: Transformer, folder: str | Path) -> int:
    """Fill the cut `model` from a Hugging Face folder and return the bytes that this rank has read: those it holds.

    Every rank calls it, on a model that is plain or cut over any axes. Under ZeRO-1 and 2 a rank
    reads its slices and gets the others' by all-gather. Numbers are converted to the parameters' dtype. Raises
    ValueError as `checkpoint.load` does, and on a model that was replicated on the meta device.
    """
    if not hasattr(model, "reducer"):
        materialise(model)
    read = 0
    with checkpoint.matched(model, folder) as sources:
        for held in zero_state.held(model):
            if held.memory.is_meta:
                raise ValueError("this model was replicated on the meta device: load it first, then replicate it")
            parameter, stored = held.parameter, sources[held.parameter]
            width = math.prod(parameter.shape[1:])
            part = stored.reshape(len(stored), -1) if stored.dim() != 1 else stored.unsqueeze(1)
            held.memory.zero_()  # and so it stays where a window is padded
            for rows, columns in rectangles(held.first, held.last, width):
                source = part[rows, columns]
                place = held.memory[rows.start * width + columns.start - held.first :]
                into = place.as_strided(source.shape, (width, 1))
                into.copy_(source)
                read += source.nbytes
    zero_state.filled(model)
    return read


def rectangles(first: int, last: int, width: int) -> Iterator[tuple[slice, slice]]:
    """Elements `first` to `last` of a matrix with rows of `width`, as (rows, columns): three rectangles at most."""
    while first < last:
        row, column = divmod(first, width)
        if column or last - first < width:
            stop = min(width, column + last - first)
            yield slice(row, row + 1), slice(column, stop)
            first += stop - column
        else:
            rows = (last - first) // width
            yield slice(row, row + rows), slice(0, width)
            first += rows * width


@torch.no_grad()
def whole(model: Transformer) -> Iterator[tuple[list[str], torch.Tensor]]:
    """All names of a parameter and its whole value, on every rank, one parameter after another in the model's order.

    Every rank calls it and goes through all of it. A value is new memory or the parameter's own: don't write to it.
    """
    marks = grads.marks(model)

    def value(parameter: nn.Parameter) -> torch.Tensor:
        held = _unsharded(model, parameter)
        window, groups = getattr(parameter, "window", None), marks.get(parameter, grads.Mark()).cut
        return held if window is None or not groups else _joined(held, window, groups[0])

    experts = next((each.cut[-1] for each in marks.values() if each.spread), None)
    pipeline = getattr(model, "pipeline", None)
    layers = None if pipeline is None else pipeline.group
    mine = {names[0]: parameter for names, parameter in distinct(model)}
    device = next((parameter.device for parameter in mine.values()), None)
    for names, shape, dtype, expert, stage in _listed(model, experts, layers, device):
        here = layers is None or stage == layers.rank()
        out = value(mine[names[0]]) if here and names[0] in mine else torch.empty(
            shape, dtype=getattr(torch, dtype), device=device)
        if here and experts is not None and expert is not None:
            out = ops.broadcast(out, dist.get_global_rank(experts, expert), experts)
        if layers is not None and stage is not None:
            out = ops.broadcast(out, dist.get_global_rank(layers, stage), layers)
        yield names, out


def save(model: Transformer, folder: str | Path) -> None:
    """Write the cut `model` whole, as a Hugging Face folder that `transformers` loads, in the dtype of its parameters.

    Every rank calls it; the first one writes. The folder appears whole or not at all. Raises FileExistsError, on all
    ranks, where it is there and not empty, ValueError on a model that no Hugging Face type fits.
    """
    writes = not dist.is_initialized() or dist.get_rank() == 0
    config(model.spec, "float32")
    full = torch.tensor(writes and is_full(Path(folder)))
    if dist.is_initialized():
        ops.broadcast(full, 0)
    if full:
        raise FileExistsError(f"{folder} exists already: name another folder, or remove it first")
    # to the host at once, so that the card has one whole parameter at a time
    values = {names[0]: value.cpu().clone() for names, value in whole(model) if writes}
    if writes:
        checkpoint.write(model.spec, values, folder)
    if dist.is_initialized():
        ops.barrier()


class _Entry(NamedTuple):
    """A parameter of the whole model: all its names, its whole shape, its dtype, and who has it: a rank of the experts'
    group, if not all have, and a rank of the pipeline's."""

    names: list[str]
    shape: list[int]
    dtype: str
    expert: int | None = None
    stage: int | None = None


def _listed(model: Transformer, experts: dist.ProcessGroup | None, layers: dist.ProcessGroup | None,
            device: torch.device | None) -> list[_Entry]:
    """The parameters of all ranks of the two groups, in the whole model's order."""
    found = {names[0]: _Entry(names, _whole_shape(parameter), str(parameter.dtype).removeprefix("torch."))
             for names, parameter in distinct(model)}
    if experts is not None:
        own, found = list(found.values()), {}
        for rank, each in enumerate(zero_state.told(own, experts, device)):
            for names, shape, dtype, *_ in each:
                found[names[0]] = _Entry(names, shape, dtype, None if names[0] in found else rank)
    if layers is not None:
        own, found = list(found.values()), {}
        for rank, each in enumerate(zero_state.told(own, layers, device)):
            for names, shape, dtype, expert, _ in each:
                known = found.setdefault(names[0], _Entry(names, shape, dtype, expert, rank))
                if len(names) > len(known.names):  # a tied embedding, of which the last rank knows both names
                    known.names[:] = names
    if experts is None and layers is None:
        return list(found.values())
    first: dict[str, int] = {}  # where a layer's experts begin
    for i, name in enumerate(found):
        first.setdefault(name.partition(".experts.")[0], i)

    def place(entry: _Entry) -> tuple[float, int, int]:
        kind, number, *_ = entry.names[0].split(".")
        layer = int(number) if kind == "layers" else -1 if kind == "embed_tokens" else math.inf
        before, _, of_expert = entry.names[0].partition(".experts.")
        return layer, first[before], int(of_expert.partition(".")[0] or 0)

    return sorted(found.values(), key=place)


def _whole_shape(parameter: nn.Parameter) -> list[int]:
    shape, window = list(parameter.shape), getattr(parameter, "window", None)
    if window is not None:
        shape[window.dim] = window.full
    return shape


def _unsharded(model: nn.Module, parameter: nn.Parameter) -> torch.Tensor:
    """The parameter as it was before ZeRO-3 cut it into runs of elements, or as it is."""
    reducer = getattr(model, "reducer", None)
    if reducer is None or not reducer.shards or reducer.weights.opened:
        return parameter.detach()
    row = next((row for row in reducer.weights.held if parameter in row.start), None)
    if row is None:
        return parameter.detach()
    runs = [next(((first, last) for each, first, last in row.slices(r) if each is parameter), (0, 0))
            for r in range(reducer.group.size())]
    mine = parameter.new_zeros(max(last - first for first, last in runs))
    first, last = runs[reducer.group.rank()]
    if first < last:
        mine[: last - first] = reducer.weights.slices[row].part(reducer.weights.held[row], parameter)
    parts = ops.all_gather(mine, reducer.group).view(len(runs), -1)
    return torch.cat([part[: last - first] for part, (first, last) in zip(parts, runs, strict=True)]).view(
        parameter.shape)


def _joined(mine: torch.Tensor, window: checkpoint.Window, group: dist.ProcessGroup) -> torch.Tensor:
    """The whole of what each rank has a window of. Several may have the same one."""
    span = torch.tensor([window.start, window.stop], device=mine.device)
    parts = ops.all_gather(mine.transpose(0, window.dim).contiguous(), group).chunk(group.size())
    out = parts[0].new_empty(window.full, *parts[0].shape[1:])
    for part, (start, stop) in zip(parts, ops.all_gather(span, group).view(-1, 2).tolist(), strict=True):
        out[start:stop] = part[: stop - start]
    return out.transpose(0, window.dim).contiguous()
