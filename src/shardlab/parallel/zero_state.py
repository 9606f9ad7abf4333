"""The whole model again: its weights, and the optimizer's states as the plain optimizer has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn, optim

from ..comm import ops
from .agreement import told
from .flat import Flat
from .gathering import alone
from .stepped import MASTER, belong, sharded

if TYPE_CHECKING:
    from .zero import Stage1

PLAIN = ("step", "mu_product", "mu", "eta")  # states that are one number a parameter; all others are one an element


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """All ranks have all weights in the block, and run by themselves there; what it changes, alike on all ranks, stays.

    `model.state_dict()` and `load_state_dict` belong in here. A model that holds its weights whole is left as it is.
    """
    reducer = sharded(model)
    if reducer is None or reducer.weights.opened:
        yield
        return
    reducer.weights.open()
    try:
        yield
    finally:
        reducer.weights.close()
        _renew(reducer)


class Held(NamedTuple):
    """What this rank holds of a parameter's weights: elements first to last of the flattened parameter, in `memory`."""

    parameter: nn.Parameter
    first: int
    last: int
    memory: torch.Tensor


def held(model: nn.Module) -> Iterator[Held]:
    """The weights that this rank answers for, to be filled from a file: write into `memory`, then call `filled`."""
    reducer = sharded(model)
    if reducer is not None and reducer.weights.opened:
        raise RuntimeError("inside zero.gathered(model) the whole weights count: fill the slices outside of it, or use "
                           "model.load_state_dict here")
    cut = {} if reducer is None else reducer.weights.held
    for row, memory in cut.items():
        slice = reducer.weights.slices[row]  # type: ignore[union-attr]
        for parameter, (first, last) in slice.spans.items():
            yield Held(parameter, first, last, slice.part(memory, parameter))
    inside = {parameter for row in cut for parameter in row.parameters}
    for parameter in model.parameters():
        if parameter not in inside:
            yield Held(parameter, 0, parameter.numel(), parameter.detach().view(-1))


def filled(model: nn.Module) -> None:
    """What `held` gave has been filled, on every rank: master copies and the other ranks' weights follow."""
    if (reducer := sharded(model)) is not None:
        _renew(reducer)
        reducer.weights.updated()


@torch.no_grad()
def state_dict(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, Any]:
    """The optimizer's `state_dict()` as if the data axis cut nothing, on every rank; all ranks call it.

    It goes into an optimizer of the model without ZeRO, and into `load_state_dict` on any number of ranks. (Of a model
    that is cut over other axes too, it has this rank's part.) Parameters of 16 bits have one state more, "master",
    their copy in float32.
    """
    reducer = sharded(model)
    if reducer is None:
        return optimizer.state_dict()
    belong(reducer, optimizer)
    with _whole(reducer):
        out = optimizer.state_dict()
    parameters = [parameter for group in reducer.order for parameter in group]
    # of what is kept whole each rank has its own, and may have another number of
    left = alone(model)
    number = {parameter: i for i, parameter in enumerate(p for p in parameters if p not in left)}
    mine: dict[nn.Parameter, dict[str, Any]] = {
        parameter: dict(optimizer.state.get(part, {})) for parameter, part in reducer.stepped.items()}
    for parameter, _ in reducer.copied():
        mine[parameter][MASTER] = reducer.stepped[parameter].detach()
    kinds = _union({number[parameter]: {name: _kind(value) for name, value in states.items()}
                    for parameter, states in mine.items() if parameter in number}, reducer)
    state = {parameter: {name: _value(kind) for name, kind in kinds.get(i, {}).items()}
             for parameter, i in number.items()}
    state |= {parameter: {name: value.clone() if torch.is_tensor(value) else value for name, value in
                          mine[parameter].items()} for parameter in reducer.kept}
    for bucket in reducer.buckets:
        sliced = {name: dtype for parameter in bucket.flat.parameters
                  for name, (dtype, value) in kinds.get(number[parameter], {}).items() if dtype and value is None}
        for name, dtype in sorted(sliced.items()):
            values = {parameter: states[name] for parameter, states in mine.items() if name in states}
            row = whole(reducer, bucket.flat, values, getattr(torch, dtype))
            for parameter in bucket.flat.parameters:
                if name in kinds.get(number[parameter], {}):
                    state[parameter][name] = bucket.flat.view(row, parameter).clone()
    numbers = iter(range(len(parameters)))
    groups = [packed | {"params": [next(numbers) for _ in group]}
              for packed, group in zip(out["param_groups"], reducer.order, strict=True)]
    return {"state": {i: state[each] for i, each in enumerate(parameters) if state.get(each)}, "param_groups": groups}


@torch.no_grad()
def load_state_dict(model: nn.Module, optimizer: optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Take over what `state_dict` gave, or a plain optimizer; all ranks call it, each with the whole of it.

    Raises ValueError where its groups are not those of the optimizer, or its states of other shapes than parameters.
    """
    reducer = sharded(model)
    if reducer is None:
        optimizer.load_state_dict(dict(state))
        return
    belong(reducer, optimizer)
    sizes = [[len(group) for group in groups] for groups in
             (reducer.order, [saved["params"] for saved in state["param_groups"]])]
    if sizes[0] != sizes[1]:
        raise ValueError(f"the optimizer's groups have {sizes[0]} parameters, those of the states {sizes[1]}")
    spans = {parameter: span for slice in reducer.weights.slices.values() for parameter, span in slice.spans.items()}
    states: dict[int, dict[str, Any]] = {}
    groups = []
    for saved, group in zip(state["param_groups"], reducer.order, strict=True):
        local = []
        for i, parameter in zip(saved["params"], group, strict=True):
            if parameter in reducer.stepped:
                local.append(i)
                whole_states = dict(state["state"].get(i, {}))
                _fit(i, parameter, whole_states)
                if (master := whole_states.pop(MASTER, None)) is not None:
                    reducer.stepped[parameter].copy_(_cut(MASTER, master, spans.get(parameter)))
                if whole_states:
                    states[i] = {name: _cut(name, value, spans.get(parameter)) for name, value in whole_states.items()}
        groups.append({**saved, "params": local})
    with _whole(reducer):
        optimizer.load_state_dict({"state": states, "param_groups": groups})
    if reducer.low:
        reducer.after_step()  # master copies may have come with it


def whole(reducer: Stage1, row: Flat, parts: Mapping[nn.Parameter, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The whole row (numel,) of what each rank has some `parts` of, by parameter, laid out as the row's slices are."""
    mine, slice = torch.zeros(row.share, dtype=dtype, device=row.device), reducer.weights.slices[row]
    for parameter in slice.spans:
        if parameter in parts:
            slice.part(mine, parameter).copy_(parts[parameter])
    return ops.all_gather(mine, reducer.group)


@contextmanager
def _whole(reducer: Stage1) -> Iterator[None]:
    """In the block the optimizer's own state_dict and load_state_dict may be called."""
    reducer.whole = True
    try:
        yield
    finally:
        reducer.whole = False


def _fit(i: int, parameter: nn.Parameter, states: Mapping[str, Any]) -> None:
    """Raise ValueError where the states, number `i`, are not those of such a parameter."""
    for name, value in states.items():
        if torch.is_tensor(value) and name not in PLAIN and value.shape != parameter.shape:
            raise ValueError(f"state {name} of parameter {i} is {tuple(value.shape)}, the parameter "
                             f"{tuple(parameter.shape)}: these are the states of another model, or of another cut")


@torch.no_grad()
def _renew(reducer: Stage1) -> None:
    """Let master copies follow weights that have changed; the others keep what 16 bits can't hold."""
    for parameter, part in reducer.copied():
        master = reducer.stepped[parameter]
        if not torch.equal(part, master.to(part.dtype)):
            master.copy_(part)


def _cut(name: str, value: Any, span: tuple[int, int] | None) -> Any:
    """The part of a parameter's state that belongs to elements `span` of it, or all: memory of its own."""
    if not torch.is_tensor(value):
        return value
    return value.clone() if name in PLAIN or span is None else value.flatten()[slice(*span)].clone()


def _kind(value: Any) -> tuple[str, Any]:
    """(dtype, None) of a state with a number for each element, (dtype, number) of one number, ("", it) of the rest."""
    if not torch.is_tensor(value):
        return "", value
    return str(value.dtype).removeprefix("torch."), None if value.dim() else value.item()


def _value(kind: tuple[str, Any]) -> Any:
    dtype, value = kind
    return torch.tensor(value, dtype=getattr(torch, dtype)) if dtype and value is not None else value


def _union(kinds: dict[int, dict[str, tuple[str, Any]]], reducer: Stage1) -> dict[int, dict[str, tuple[str, Any]]]:
    """What the ranks say of the states, put together: a rank knows of the parameters that it has a part of."""
    device = next((bucket.flat.device for bucket in reducer.buckets), None)
    out: dict[int, dict[str, tuple[str, Any]]] = {}
    for each in told(kinds, reducer.group, device):
        for i, states in each.items():
            out.setdefault(int(i), {}).update({name: tuple(kind) for name, kind in states.items()})
    return out
