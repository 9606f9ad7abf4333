"""The parameters of a rank, in the order in which the model has them: what the data axis lays in rows and sends."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import NamedTuple

from ..specs import ModelSpec, TensorSpec


class Parameter(NamedTuple):
    """What one of `tp` ranks holds of one weight: `numel` numbers, padding included, in `group` of the spec's.

    `copies` is how many of the ranks hold the same with a part of its gradient each: 1 where none does. `cut` says
    whether the ranks together hold different parts of it.
    """

    name: str
    group: str
    numel: int
    copies: int
    cut: bool
    trained: bool

    @property
    def layer(self) -> int | None:
        """Which layer has it; None at the ends."""
        return int(self.name.split(".", 2)[1]) if self.name.startswith("layers.") else None


class Parameters(tuple[Parameter, ...]):
    """The parameters of a rank in the model's order; a tied head is the embedding, and not listed again."""

    @property
    def trained(self) -> list[Parameter]:
        """Those that are not frozen."""
        return [parameter for parameter in self if parameter.trained]

    def reached(self, name: str) -> bool:
        """Whether backward comes to the output of the weight `name`: whether it, or one before it, is trained."""
        for parameter in self:
            if parameter.trained:
                return True
            if parameter.name == name:
                return False
        raise ValueError(f"there is no {name}")


def parameters(spec: ModelSpec, tp: int = 1, sp: bool = False, frozen: Collection[str] = ()) -> Parameters:
    """What each of `tp` ranks holds of `spec`. `frozen` names weights, or modules with all weights inside them:
    ("embed_tokens", "layers.0.mlp.up_proj"). With `sp`, sequence parallelism, each rank has the gradients of its part
    of the sequence for weights that all hold whole. Raises ValueError on a name that the model doesn't have."""
    if isinstance(frozen, str):
        raise ValueError(f"frozen = {frozen!r} is one name: give several, ({frozen!r},)")
    unmet = set(frozen)

    def named(name: str) -> Iterator[str]:
        return (each for each in frozen if name == each or name.startswith(f"{each}."))

    held = []
    for tensor in spec.tensors():
        freezing = list(named(tensor.name)) if unmet or frozen else []
        unmet.difference_update(freezing)
        held.append(_held(tensor, tp, sp, not freezing))
    if unmet:
        tied = ": its head is tied, and the embedding's weight" if spec.tied and "lm_head" in str(unmet) else ""
        raise ValueError(f"{spec.name} has no {', '.join(sorted(unmet))} to freeze{tied}")
    return Parameters(held)


def _held(tensor: TensorSpec, tp: int, sp: bool, trained: bool) -> Parameter:
    partial = tensor.cut in ("kv_heads", "shared") or (sp and tensor.cut == "whole")
    return Parameter(tensor.name, tensor.group, math.prod(tensor.local_shape(tp)),
                     tensor.copies(tp) if partial else 1, tp > 1 and tensor.cut not in ("shared", "whole"), trained)
