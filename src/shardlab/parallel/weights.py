"""Weights of a cut model from a Hugging Face folder and back: each rank reads what it holds, and one writes the whole.

    with torch.device("meta"):
        model = Transformer(ModelSpec.from_config(folder))      # no rank ever has it whole
    tensor.cut(model, tp)
    zero.shard(model, optimizer, dp, stage=3)
    weights.load(model, folder)

A rank may hold a window of a tensor (tensor parallelism), of which it holds a run of elements (ZeRO). Row by row that
run is a rectangle, with a part of a row before it and one behind it, and each of the three is read for itself. What an
optimizer keeps beside a parameter is cut as the parameter is, and read in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn, optim

from ..comm import ops
from ..model import checkpoint
from ..model.folders import is_full, written_whole
from ..model.hf_config import config, stored_name
from ..model.parameters import distinct, materialise
from ..model.stored import Stored
from ..model.transformer import Transformer
from . import zero_state
from .agreement import together
from .stepped import MASTER, stepped
from .whole import listed, tensors

OPTIMIZER = "optimizer"  # the stem of the files with states


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
            read += _fill(held.memory, held.first, held.last, held.parameter, sources[held.parameter])
    zero_state.filled(model)
    return read


@torch.no_grad()
def load_states(model: Transformer, optimizer: optim.Optimizer, folder: str | Path,
                kinds: Mapping[str, Mapping[str, tuple[str, float | None]]]) -> int:
    """Give the `optimizer` of the cut `model` the states in a folder, in place of its own, and return the bytes read.

    `kinds[name][state]` is (dtype, number) of each state of the weights that are called `name` in the folder: its one
    number, or None for a tensor, which is called "state.name" there. A state "master" goes into the float32 copy that
    is stepped. Weights are filled before.
    """
    names = {parameter: each[0] for each, parameter in distinct(model)}
    optimizer.state.clear()
    read = 0
    stored = Stored(folder, OPTIMIZER) if any(number is None for each in kinds.values()
                                              for _, number in each.values()) else None
    for part in stepped(model, optimizer):
        on_card = part.options.get("capturable") or part.options.get("fused") or isinstance(optimizer, optim.ASGD)
        device = part.tensor.device if on_card else torch.device("cpu")  # where the optimizer has its counters
        name = stored_name(model.spec, names[part.parameter])
        for state, (dtype, number) in kinds.get(name, {}).items():
            if number is not None or stored is None:
                optimizer.state[part.tensor][state] = (
                    torch.tensor(number, dtype=getattr(torch, dtype), device=device) if dtype else number)
                continue
            into = part.tensor.detach()
            if state != MASTER:
                into = torch.empty_like(into, dtype=getattr(torch, dtype))
                optimizer.state[part.tensor][state] = into
            source = stored.tensor(f"{state}.{name}")
            read += _fill(into.view(-1), part.first, part.last, part.parameter, checkpoint.part(part.parameter, source))
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


def whole(model: Transformer) -> Iterator[tuple[list[str], torch.Tensor]]:
    """All names of a parameter and its whole value, on every rank, one parameter after another in the model's order.

    Every rank calls it and goes through all of it. A value is new memory or the parameter's own: don't write to it.
    """
    return ((entry.names, value) for entry, value in tensors(model, listed(model)))


def save(model: Transformer, folder: str | Path) -> None:
    """Write the cut `model` whole, as a Hugging Face folder that `transformers` loads, in the dtype of its parameters.

    Every rank calls it; the first one writes, and holds no more than a file's tensors. The folder appears whole or not
    at all. Raises, on all ranks, FileExistsError where it is there and not empty, and where it can't be written what
    `agreement.together` does; ValueError on a model that no Hugging Face type fits.
    """
    writes = not dist.is_initialized() or dist.get_rank() == 0
    config(model.spec, "float32")
    full = torch.tensor(writes and is_full(Path(folder)))
    if dist.is_initialized():
        ops.broadcast(full, 0)
    if full:
        raise FileExistsError(f"{folder} exists already: name another folder, or remove it first")
    entries, failure = listed(model), None
    values = ((entry.name, value) for entry, value in tensors(model, entries))
    if writes:
        try:
            with written_whole(Path(folder)) as unfinished:
                checkpoint.write(model.spec, getattr(torch, entries[0].dtype), values, unfinished)
        except Exception as error:  # a full disk, say; the others wait for this rank's part in what follows
            failure = error
    for _ in values:
        pass
    together(failure, f"write {folder}")


def _fill(memory: torch.Tensor, first: int, last: int, parameter: nn.Parameter, part: torch.Tensor) -> int:
    """Copy elements `first` to `last` of the flattened `parameter` into `memory` from the stored `part` in its window,
    zeros into its padding; return the bytes read."""
    width, read = math.prod(parameter.shape[1:]), 0
    part = part.flatten(1) if part.dim() > 1 else part.unsqueeze(1)
    memory.zero_()
    for rows, columns in rectangles(first, last, width):
        source = part[rows, columns]
        place = memory[rows.start * width + columns.start - first :]
        place.as_strided(source.shape, (width, 1)).copy_(source)
        read += source.nbytes
    return read
