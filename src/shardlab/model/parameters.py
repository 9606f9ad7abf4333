"""A model's parameters as a checkpoint sees them: each once, with all its names and the part of it that is held."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Window:
    """The part of a whole tensor that a parameter holds: rows `start` to `stop` of its `full` rows along `dim`.

    What the parameter holds past those `stop - start` rows is padding.
    """

    dim: int
    start: int
    stop: int
    full: int


def distinct(model: nn.Module) -> list[tuple[list[str], nn.Parameter]]:
    """Each parameter of `model` once, with all its names: two for tied embeddings, one for the others."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [(aliases, parameter) for parameter, aliases in names.items()]


def materialise(model: nn.Module, device: torch.device | str = "cpu") -> None:
    """Give every parameter on the meta device memory on `device`, unfilled; the others stay as they are.

    Ties stay ties (`nn.Module.to_empty` would break them), and a parameter's attributes, its window among them, stay.
    """
    for names, parameter in distinct(model):
        materialised(model, names, parameter, device)


def materialised(
    model: nn.Module, names: list[str], old: nn.Parameter, device: torch.device | str
) -> nn.Parameter:
    """`old`, or if it is on meta its successor under all its `names`, with memory on `device`."""
    if not old.is_meta:
        return old
    return replaced(model, names, old, torch.empty(old.shape, dtype=old.dtype, device=device))


def replaced(model: nn.Module, names: list[str], old: nn.Parameter, memory: torch.Tensor) -> nn.Parameter:
    """The parameter that is in the place of `old` from now on, under all its `names`: as it was, but in `memory`."""
    new = nn.Parameter(memory, requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)
    for name in names:
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, new)
    return new


def off_meta(model: nn.Module, device: torch.device | str, later: Callable[[nn.Parameter], bool]
             ) -> dict[nn.Parameter, nn.Parameter]:
    """Replace the parameters on meta by some on `device`, unfilled; returns them by the old ones.

    Those of which `later(parameter)` is true take the memory of one number, until they are given a place.
    """
    new = {}
    for names, old in distinct(model):
        if old.is_meta:
            shape = () if later(old) else old.shape
            memory = torch.zeros(shape, dtype=old.dtype, device=device).expand(old.shape)
            new[old] = replaced(model, names, old, memory)
    return new


@torch.no_grad()
def initialise(model: nn.Module, seed: int = 0, std: float = 0.02, device: torch.device | str = "cpu") -> nn.Module:
    """Fill the plain `model` for training from scratch, and return it: norms 1, biases 0, the rest normal(0, std).

    Parameters on meta get memory on `device` first. Values depend on `seed` and the model's spec alone: they are drawn
    in float32, and the same in every dtype but for rounding. Raises ValueError on a cut model, whose ranks would each
    draw their own.
    """
    materialise(model, device)
    generator = torch.Generator(device).manual_seed(seed)
    shared = hasattr(model, "reducer") or hasattr(model, "pipeline")
    shared = shared or any("marks" in vars(module) for module in model.modules())  # by `parallel.grads`
    for names, parameter in distinct(model):
        if shared or hasattr(parameter, "window"):
            raise ValueError(f"{names[0]} is cut or shared out already: initialise the plain model, then cut it")
        if parameter.dim() > 1:
            drawn = torch.empty(parameter.shape, dtype=torch.float32, device=device)
            parameter.copy_(drawn.normal_(0, std, generator=generator))
        else:
            parameter.fill_(0.0 if names[0].endswith("bias") else 1.0)
    return model
