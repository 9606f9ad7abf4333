"""Tensors of the whole model, one after another on every rank: weights, and what the optimizer keeps beside each.

A rank may have some of the layers (a pipeline), some of their experts, of each tensor a window (tensor parallelism),
and of that a run of elements (ZeRO). Ranks tell each other what there is, and put it together in the reverse order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn, optim

from ..comm import ops
from ..model.checkpoint import whole_shape
from ..model.parameters import Window, distinct
from ..model.transformer import Transformer
from . import grads
from .agreement import told
from .gathering import alone
from .stepped import order, sharded, stepped


class Entry(NamedTuple):
    """A tensor of the whole model: a parameter's weights, or a `state` of its, which is one number or has the
    parameter's whole `shape`.

    `dtype` is "" for a number of Python's. `group` is the number of the optimizer's group that the parameter is in, of
    weights alone. `expert` and `stage` say who has it: a rank of the experts' group, if not all have, and a rank of the
    pipeline's.
    """

    names: list[str]  # all names of the parameter
    state: str  # "" for the weights
    shape: list[int]
    dtype: str
    number: float | None = None  # of a state that is one
    group: int | None = None
    expert: int | None = None
    stage: int | None = None

    @property
    def name(self) -> str:
        """The parameter's first name."""
        return self.names[0]


def listed(model: Transformer, optimizer: optim.Optimizer | None = None) -> list[Entry]:
    """What there is on all ranks, in the whole model's order, each parameter's states after its weights.

    Every rank calls it. Raises ValueError on a state that is neither a number nor of its parameter's shape.
    """
    found = {(each.name, each.state): each for each in _own(model, optimizer)}
    _add_slices(found, model, optimizer)
    experts, layers = _groups(model)
    device = next((parameter.device for parameter in model.parameters()), None)
    if experts is not None:
        own, found = list(found.values()), {}
        for rank, each in enumerate(told(own, experts, device)):
            for entry in (Entry(*fields) for fields in each):
                key = entry.name, entry.state
                found[key] = entry._replace(expert=None if key in found else rank)
    if layers is not None:
        own, found = list(found.values()), {}
        for rank, each in enumerate(told(own, layers, device)):
            for entry in (Entry(*fields) for fields in each):
                known = found.setdefault((entry.name, entry.state), entry._replace(stage=rank))
                if len(entry.names) > len(known.names):  # a tied embedding, of which the last rank knows both names
                    known.names[:] = entry.names
    parameters = [name for name, state in found if not state]
    number = {name: i for i, name in enumerate(parameters)}
    if experts is None and layers is None:
        return sorted(found.values(), key=lambda each: (number[each.name], each.state))
    first: dict[str, int] = {}  # where a layer's experts begin
    for i, name in enumerate(parameters):
        first.setdefault(name.partition(".experts.")[0], i)

    def place(entry: Entry) -> tuple[float, int, int, int, str]:
        kind, layer, *_ = entry.name.split(".")
        at = int(layer) if kind == "layers" else -1 if kind == "embed_tokens" else math.inf
        before, _, of_expert = entry.name.partition(".experts.")
        return at, first[before], int(of_expert.partition(".")[0] or 0), number[entry.name], entry.state

    return sorted(found.values(), key=place)


@torch.no_grad()
def tensors(model: Transformer, entries: Iterable[Entry], optimizer: optim.Optimizer | None = None
            ) -> Iterator[tuple[Entry, torch.Tensor]]:
    """The whole value of each of the `entries`, some of those that `listed` gives, on every rank.

    Every rank calls it, with the same ones, none of which is a number, and goes through all of it. A value is new
    memory or this rank's own: don't write to it.
    """
    experts, layers = _groups(model)
    mine = {names[0]: parameter for names, parameter in distinct(model)}
    states = {} if optimizer is None else {
        (part.parameter, state): value for part in stepped(model, optimizer)
        for state, value in part.states.items()}
    marks = grads.marks(model)
    device = next((parameter.device for parameter in mine.values()), None)
    for entry in entries:
        dtype = getattr(torch, entry.dtype)
        here = layers is None or entry.stage == layers.rank()
        if here and (parameter := mine.get(entry.name)) is not None:
            memory = states.get((parameter, entry.state)) if entry.state else parameter.detach()
            out = _unsharded(model, parameter, entry.state, memory, dtype)
            window, groups = getattr(parameter, "window", None), marks.get(parameter, grads.Mark()).cut
            out = out if window is None or not groups else _joined(out, window, groups[0])
        else:
            out = torch.empty(entry.shape, dtype=dtype, device=device)
        if here and experts is not None and entry.expert is not None:
            out = ops.broadcast(out, dist.get_global_rank(experts, entry.expert), experts)
        if layers is not None and entry.stage is not None:
            out = ops.broadcast(out, dist.get_global_rank(layers, entry.stage), layers)
        yield entry, out


def _own(model: Transformer, optimizer: optim.Optimizer | None) -> Iterator[Entry]:
    """What this rank has something of."""
    names = {parameter: each for each, parameter in distinct(model)}
    groups = [] if optimizer is None else order(model, optimizer)
    group = {parameter: i for i, each in enumerate(groups) for parameter in each}
    for parameter, each in names.items():
        yield Entry(each, "", list(whole_shape(parameter)), _dtype(parameter), group=group.get(parameter))
    if optimizer is None:
        return
    for part in stepped(model, optimizer):
        for state, value in part.states.items():
            of = names[part.parameter]
            of_shape = torch.is_tensor(value) and value.shape == part.tensor.shape
            if not (of_shape or isinstance(value, (int, float)) or (torch.is_tensor(value) and value.dim() == 0)):
                what = tuple(value.shape) if torch.is_tensor(value) else f"a {type(value).__name__}"
                raise ValueError(f"{type(optimizer).__name__}'s {state} of {of[0]} is {what}: states that can be put "
                                 f"together are one number, or of the parameter's shape, {tuple(part.tensor.shape)}")
            if of_shape:
                yield Entry(of, state, list(whole_shape(part.parameter)), _dtype(value))
            else:
                yield Entry(of, state, [], _dtype(value), value.item() if torch.is_tensor(value) else value)


def _add_slices(found: dict[tuple[str, str], Entry], model: Transformer, optimizer: optim.Optimizer | None) -> None:
    """What other ranks of the data axis know: under ZeRO a rank has the states of the parameters it has a part of."""
    reducer = sharded(model)
    if reducer is None or optimizer is None:
        return
    left = alone(model)
    shared = {names[0] for names, parameter in distinct(model) if parameter not in left}
    own = [each for each in found.values() if each.state and each.name in shared]
    device = next((bucket.flat.device for bucket in reducer.buckets), None)
    for each in told(own, reducer.group, device):
        for entry in (Entry(*fields) for fields in each):
            found.setdefault((entry.name, entry.state), entry)


def _groups(model: nn.Module) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """The groups that experts, and layers, are shared out over."""
    experts = next((each.cut[-1] for each in grads.marks(model).values() if each.spread), None)
    pipeline = getattr(model, "pipeline", None)
    return experts, None if pipeline is None else pipeline.group


def _dtype(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.") if torch.is_tensor(value) else ""


def _unsharded(model: nn.Module, parameter: nn.Parameter, state: str, memory: torch.Tensor | None,
               dtype: torch.dtype) -> torch.Tensor:
    """The parameter's weights or `state` as they were before ZeRO cut them into runs of elements, from `memory`: this
    rank's run, if it has one, or all."""
    reducer = sharded(model)
    row = None
    if reducer is not None and (state or (reducer.partial and not reducer.weights.opened)):
        row = next((row for row in reducer.weights.slices if parameter in row.start), None)
    if reducer is None or row is None:
        if memory is None:
            raise RuntimeError(f"this rank has no {state} of a parameter of which others have one")
        return memory.view(parameter.shape)
    runs = [next(((first, last) for each, first, last in row.slices(r) if each is parameter), (0, 0))
            for r in range(reducer.group.size())]
    first, last = runs[reducer.group.rank()]
    mine = torch.zeros(max(last - first for first, last in runs), dtype=dtype, device=row.device)
    if not state:
        memory = reducer.weights.slices[row].part(reducer.weights.held[row], parameter) if first < last else None
    if memory is not None:
        mine[: last - first] = memory.view(-1)
    parts = ops.all_gather(mine, reducer.group).view(len(runs), -1)
    return torch.cat([part[: last - first] for part, (first, last) in zip(parts, runs, strict=True)]).view(
        parameter.shape)


def _joined(mine: torch.Tensor, window: Window, group: dist.ProcessGroup) -> torch.Tensor:
    """The whole of what each rank has a window of. Several may have the same one."""
    span = torch.tensor([window.start, window.stop], device=mine.device)
    parts = ops.all_gather(mine.transpose(0, window.dim).contiguous(), group).chunk(group.size())
    out = parts[0].new_empty(window.full, *parts[0].shape[1:])
    for part, (start, stop) in zip(parts, ops.all_gather(span, group).view(-1, 2).tolist(), strict=True):
        out[start:stop] = part[: stop - start]
    return out.transpose(0, window.dim).contiguous()
