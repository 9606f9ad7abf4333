"""The one place that finishes gradients after backward, takes their norm and clips them.

Most gradients of a cut model are right when backward ends, since the regions summed what flowed through them. What is
left is noted by the cuts, parameter by parameter (`mark`), and by the data axis, which has its `Reducer` on the model:

| the ranks of a group hold                     | noted as   | `finish`           | `norm`                       |
|-----------------------------------------------|------------|--------------------|------------------------------|
| different parts of a parameter                | cut        | nothing            | adds their squares           |
| the same, and each has a part of its gradient | partial    | sums the gradients | counts it once               |
| the same, and the same gradient               |            | nothing            | counts it once               |
| one model each, for different tokens          | a reducer  | sums the gradients | once, or adds shards' squares |
| different layers                              | a pipeline | nothing            | adds their squares           |
| different experts, for data of them all       | spread     | nothing, but sums  | adds their squares           |
|                                               |            | over their copies  |                              |

The marks are on modules, since `load_state_dict(assign=True)` replaces parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..comm import ops, phase
from .grads_check import check_tokens, inside


@dataclass(frozen=True)
class Mark:
    """How ranks hold a parameter: `cut` over groups, the same but with `partial` gradients on a group, or both: with
    fewer KV heads than ranks some hold the same one, and together they hold all. An expert is `spread`: it is cut over
    ranks of the data axis, which has no more to do with it."""

    cut: tuple[dist.ProcessGroup, ...] = ()
    partial: dist.ProcessGroup | None = None
    spread: bool = False


class Piece(NamedTuple):
    """What this rank holds of a parameter's gradient: all of it, or the slice that ZeRO leaves here. The ranks of each
    of the `groups` hold the others."""

    name: str
    gradient: torch.Tensor
    mark: Mark
    groups: tuple[dist.ProcessGroup, ...]


Known = tuple[str, nn.Parameter, Mark, tuple[dist.ProcessGroup, ...]]  # of a parameter: see `_parameters`


def mark(module: nn.Module, name: str = "weight", *, cut: dist.ProcessGroup | tuple[dist.ProcessGroup, ...] = (),
         partial: dist.ProcessGroup | None = None, spread: bool = False) -> None:
    """Note how ranks hold the parameter `name` of `module`, if it has one."""
    if getattr(module, name, None) is not None:
        groups = cut if isinstance(cut, tuple) else (cut,)
        module.__dict__.setdefault("marks", {})[name] = Mark(groups, partial, spread)


@torch.no_grad()
def finish(model: nn.Module) -> None:
    """Sum what backward left in parts, in place: over the data axis, then over ranks that hold the same.

    Every rank calls it once, after its last backward and before `clip_grad_norm_` and the optimizer's step. The parts
    travel in one piece, one all-reduce for each group and dtype. Raises RuntimeError where these are summed already,
    where a parameter is trained that was frozen, or not there, when the model got its data axis, where the sequence is
    cut over ranks that no data axis takes in, and where experts have the gradients of more or fewer ranks' tokens than
    the rest of the model.
    """
    every = list(_parameters(model))
    check_tokens(model, [own for _, _, own, _ in every])
    with phase("finish"):
        if (reducer := getattr(model, "reducer", None)) is not None:
            for name, parameter, own, _ in every:
                if parameter.requires_grad and parameter not in reducer and not own.spread:
                    raise RuntimeError(f"the gradient of {name} is not summed over ranks: it is new, or was frozen, "
                                       "since the model was replicated or sharded; do that last")
            reducer.finish()
        parts: dict[tuple, list[torch.Tensor]] = {}
        for piece in pieces(model, every):
            if piece.mark.partial is not None:
                if hasattr(piece.gradient, "finished"):  # also where another backward pass has been added to it
                    raise RuntimeError(f"the gradient of {piece.name} is summed already: call grads.finish once a "
                                       "step, and zero_grad(), which sets gradients to None, before the next backward")
                parts.setdefault((piece.mark.partial, piece.gradient.dtype), []).append(piece.gradient)
        for (group, _), gradients in parts.items():
            summed = ops.all_reduce(torch.cat([gradient.flatten() for gradient in gradients]), group=group)
            for gradient, part in zip(gradients, summed.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))
                gradient.finished = gradient._version  # type: ignore[attr-defined]


def marks(model: nn.Module) -> dict[nn.Parameter, Mark]:
    """How ranks hold the parameters that a cut has noted."""
    return {getattr(module, name): each for module in model.modules()
            for name, each in getattr(module, "marks", {}).items()}


def spread(model: nn.Module) -> set[nn.Parameter]:
    """The parameters that the data axis leaves alone: see `Mark`."""
    return {parameter for parameter, each in marks(model).items() if each.spread}


def pieces(model: nn.Module, every: Iterable[Known] | None = None) -> Iterator[Piece]:
    """What this rank holds of the gradients, each parameter once, those without a gradient left out. `every` is what
    `_parameters` gives, where that is known: with many experts, looking through a model takes longer than summing."""
    held = getattr(model, "reducer", None)
    for name, parameter, own, groups in _parameters(model) if every is None else every:
        if parameter.requires_grad:
            gradient = parameter.grad if held is None or own.spread else held.gradient(parameter)
            if gradient is not None:
                yield Piece(name, gradient, own, groups)


@torch.no_grad()
def norm(model: nn.Module, norm_type: float = 2.0) -> torch.Tensor:
    """The norm of all gradients of the whole model as one vector: a float64 scalar, the same on every rank.

    Each number counts once, however many ranks hold it. Every rank calls it, after `finish`. `norm_type` is p of
    (Σ |g|^p)^(1/p), or inf for the largest |g|. What is nan or infinite on one rank makes it so on all, even where
    another rank's copy counts. Raises ValueError on a `norm_type` below 1, RuntimeError before `finish`, and where that
    raises it for a cut sequence or experts.
    """
    return _norm(model, norm_type, list(_parameters(model)))


def _norm(model: nn.Module, norm_type: float, every: list[Known]) -> torch.Tensor:
    if not norm_type >= 1:
        raise ValueError(f"norm_type = {norm_type}: give a number from 1, or inf")
    check_tokens(model, [own for _, _, own, _ in every])
    largest, reducer = math.isinf(norm_type), getattr(model, "reducer", None)
    if reducer is not None and reducer.used:
        raise RuntimeError("the gradients are not summed over ranks yet: call grads.finish(model) after backward")
    # by what the parameters are, not by what is there: a rank that holds no gradient takes part all the same. What is
    # frozen is so on all ranks, but for experts, of which each has its own
    pipeline = _pipeline(model)
    join = torch.maximum if largest else torch.add
    total = torch.zeros((), dtype=torch.float64, device=every[0][1].device if every else None)
    with phase("clip"):
        for spread in (False, True):  # experts lie over other groups than the rest: two sums
            some = [groups for _, parameter, own, groups in every
                    if own.spread is spread and (spread or parameter.requires_grad)]
            axes = dict.fromkeys(group for groups in some for group in groups if group not in pipeline)
            part = torch.zeros_like(total)
            for piece in pieces(model, every):
                if piece.mark.spread is spread:
                    part = join(part, _share(piece, axes, norm_type, summed=reducer is not None and not spread))
            total = join(total, _over(axes, part, largest))
        # the pipeline's last, for its stages may differ in the others: each has its own sum by then
        total = _over(pipeline, total, largest)
    return total if largest else total ** (1 / norm_type)


def _share(piece: Piece, axes: Iterable[dist.ProcessGroup], norm_type: float, summed: bool) -> torch.Tensor:
    """What this rank counts of a gradient: `_power` of it on the first of the ranks that hold the same, else 0."""
    if piece.mark.partial and not summed and not hasattr(piece.gradient, "finished"):
        raise RuntimeError(f"this rank has a part of the gradient of {piece.name}: call grads.finish(model) first")
    own = _power(piece.gradient, norm_type)
    alike = [group for group in axes if group not in piece.groups]
    alike += [piece.mark.partial] if piece.mark.partial and inside(piece.mark.partial, piece.groups) else []
    # of what is not finite this leaves nan
    return own * 0 if any(group.rank() for group in alike) else own


def _over(groups: Iterable[dist.ProcessGroup], part: torch.Tensor, largest: bool) -> torch.Tensor:
    """The sum of all ranks' `part`, or the largest, group by group."""
    if largest:
        part = part.where(~part.isnan(), math.inf)  # a backend's maximum may lose nan
    for group in groups:
        ops.all_reduce(part, "max" if largest else "sum", group)
    return part


def _power(gradient: torch.Tensor, p: float) -> torch.Tensor:
    """Σ |g|^p, or for p = inf the largest |g|: a float64 scalar.

    A float32 sum of millions of squares is wrong in its fifth digit. Sums of 1,024 are added up in float64 here, which
    takes a few milliseconds more for 26 million.
    """
    if math.isinf(p):
        low, high = gradient.aminmax()
        return torch.maximum(-low, high).double()
    flat, dtype = gradient.flatten(), torch.promote_types(gradient.dtype, torch.float32)
    whole = flat.numel() // 1024 * 1024
    parts = flat[:whole].view(-1, 1024), flat[whole:].view(1, -1)
    sums = [torch.linalg.vector_norm(part, p, dim=1, dtype=dtype).double().pow(p).sum() for part in parts]
    return sums[0] + sums[1]


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0,
                    error_if_nonfinite: bool = True) -> torch.Tensor:
    """Scale all gradients so that their `norm` is `max_norm` at most; returns the norm before that.

    PyTorch's of the same name, for a cut model: the coefficient is min(1, max_norm / (norm + 1e-6)). Where the norm is
    nan or infinite all ranks know it. They raise FloatingPointError together, each naming what it holds that is not
    finite; or with `error_if_nonfinite` False leave the gradients alone, so that all can skip the step.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm = {max_norm}: give a number above 0, or inf to clip nothing")
    every = list(_parameters(model))
    total = _norm(model, norm_type, every)
    if not torch.isfinite(total):
        if not error_if_nonfinite:
            return total
        here = [piece.name for piece in pieces(model, every) if not torch.isfinite(piece.gradient).all()]
        raise FloatingPointError(f"the norm of the gradients is {total.item()}; not finite on this rank: "
                                 f"{', '.join(here[:5]) or 'none'}{' …' if len(here) > 5 else ''}. "
                                 "Lower the learning rate, or skip the step: error_if_nonfinite=False")
    scale = float((max_norm / (total + 1e-6)).clamp(max=1.0))
    held = [piece.gradient for piece in pieces(model, every)] if scale < 1 else []
    if held:  # a rank may have nothing but padding
        torch._foreach_mul_(held, scale)
    return total


def _parameters(model: nn.Module) -> Iterator[Known]:
    """Every parameter once: its name, itself, its mark, and the groups of which each rank holds a piece."""
    reducer = getattr(model, "reducer", None)
    known = marks(model)
    for name, parameter in model.named_parameters():
        own = known.get(parameter, Mark())
        cut = (*own.cut, *_pipeline(model))
        shards = reducer is not None and reducer.shards and not own.spread
        yield name, parameter, own, (*cut, reducer.group) if shards else cut  # type: ignore[union-attr]


def _pipeline(model: nn.Module) -> tuple[dist.ProcessGroup, ...]:
    """The group over which the model's layers are cut, if they are."""
    pipeline = getattr(model, "pipeline", None)
    return () if pipeline is None else (pipeline.group,)
