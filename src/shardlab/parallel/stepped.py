"""What an optimizer steps of the parameters that this rank has: themselves, or what ZeRO or `masters` have put in their
place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn, optim

if TYPE_CHECKING:
    from .masters import Masters
    from .zero import Stage1

MASTER = "master"  # the state that holds a 16-bit parameter in float32


class Stepped(NamedTuple):
    """What this rank's optimizer steps of a parameter, with `options`: elements first to last of it, flattened.

    `tensor` is the parameter, a part of it of that many elements, or a float32 copy of either. `states` are the
    optimizer's for it, and "master", where the tensor is such a copy.
    """

    parameter: nn.Parameter
    first: int
    last: int
    tensor: torch.Tensor
    states: dict[str, Any]
    options: dict[str, Any]


def stepped(model: nn.Module, optimizer: optim.Optimizer) -> Iterator[Stepped]:
    """What this rank's optimizer steps, group by group."""
    reducer, keeper = sharded(model), _keeper(model)
    spans = {} if reducer is None else {
        parameter: span for slice in reducer.weights.slices.values() for parameter, span in slice.spans.items()}
    for options, parameters in zip(optimizer.param_groups, order(model, optimizer), strict=True):
        for parameter in parameters:
            tensor = parameter if keeper is None else keeper.stepped.get(parameter)
            if tensor is None:
                continue
            states = {name: value for name, value in optimizer.state.get(tensor, {}).items() if value is not None}
            if tensor.dtype != parameter.dtype:
                states[MASTER] = tensor.detach()
            yield Stepped(parameter, *spans.get(parameter, (0, parameter.numel())), tensor, states, options)


def order(model: nn.Module, optimizer: optim.Optimizer) -> list[list[nn.Parameter]]:
    """The model's parameters in each of the optimizer's groups. Raises ValueError as `state_dict` does."""
    if (reducer := sharded(model)) is not None:
        belong(reducer, optimizer)
    keeper = _keeper(model)
    return [group["params"] for group in optimizer.param_groups] if keeper is None else keeper.order


def _keeper(model: nn.Module) -> Stage1 | Masters | None:
    """What has put something else into the optimizer: both know the `order` of the parameters, and what is `stepped` of
    each."""
    return sharded(model) or getattr(model, "masters", None)


def sharded(model: nn.Module) -> Stage1 | None:
    """The model's data axis where it cuts what ranks hold: ZeRO's."""
    reducer = getattr(model, "reducer", None)
    return reducer if reducer is not None and reducer.shards else None


def belong(reducer: Stage1, optimizer: optim.Optimizer) -> None:
    """Raise ValueError where the optimizer is not the one that the model was sharded with."""
    held = {part for group in optimizer.param_groups for part in group["params"]}
    if len(optimizer.param_groups) != len(reducer.order) or held != set(reducer.stepped.values()):
        raise ValueError("this optimizer is not the one that was given to zero.shard with the model")
