"""The parameters of a rank, in the order in which the model has them: what the data axis lays in rows and sends."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import NamedTuple

from ..specs import ModelSpec, TensorSpec


class Parameter(NamedTuple):
    """What one of `tp` ranks holds of one weight: `numel` numbers, padding included; in which layer, None at the ends.

    `copies` is how many of the ranks hold the same with a part of its gradient each: 1 where none does. `cut` says
    whether the ranks together hold different parts of it.
    """

    name: str
    layer: int | None
    numel: int
    copies: int
    cut: bool
    trained: bool


class Stage(NamedTuple):
    """A stage of a pipeline: some layers, before them the embedding if it is `first`, behind them norm and head if it
    is `last`. A model that is not cut is both."""

    number: int
    layers: range
    first: bool
    last: bool

    @property
    def what(self) -> str:
        """In words: "layers 0–9, embedding"."""
        n = self.layers
        layers = [f"layers {n[0]}–{n[-1]}" if len(n) > 1 else f"layer {n[0]}"] if n else []
        ends = [name for name, there in (("embedding", self.first), ("norm, head", self.last)) if there]
        return ", ".join(layers + ends) or "no layer"


class Parameters(tuple[Parameter, ...]):
    """The parameters of a rank in the model's order; a tied head is the embedding, and not listed again."""

    def of(self, stages: Collection[Stage], tied: bool) -> Parameters:
        """Those that the stages are made of; a last one has the embedding too, where the head is `tied` to it."""
        layers = {layer for stage in stages for layer in stage.layers}
        first, last = any(stage.first for stage in stages), any(stage.last for stage in stages)
        table = first or (last and tied)
        return Parameters(
            each for each in self
            if (each.layer in layers if each.layer is not None
                else (table if each.name == "embed_tokens.weight" else first) if each.name.startswith("embed_")
                else last))

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
    held = list(_held(spec, tp, sp))
    if frozen:
        known = {name.rsplit(".", i)[0] for name, *_ in held for i in range(name.count(".") + 1)}
        if unmet := [name for name in frozen if name not in known]:
            tied = ": its head is the embedding's weight" if spec.tied and unmet[0].startswith("lm_head") else ""
            raise ValueError(f"{spec.name} has no {unmet[0]} to freeze{tied}")
        names = tuple(f"{name}." for name in frozen)
        held = [each._replace(trained=not f"{each.name}.".startswith(names)) for each in held]
    return Parameters(held)


def _held(spec: ModelSpec, tp: int, sp: bool) -> Iterator[Parameter]:
    """All of them, trained. Layers of a kind are alike, so each kind is looked at once."""
    for tensor in spec.first_tensors():
        yield Parameter(tensor.name, None, *_of(tensor, tp, sp), True)
    for layers, _ in spec.kinds():
        alike = [(tensor.name, _of(tensor, tp, sp)) for tensor in spec.layer_tensors(layers[0])]
        for layer in layers:
            for name, of in alike:
                yield Parameter(f"layers.{layer}.{name}", layer, *of, True)
    for tensor in spec.last_tensors():
        yield Parameter(tensor.name, None, *_of(tensor, tp, sp), True)


def _of(tensor: TensorSpec, tp: int, sp: bool) -> tuple[int, int, bool]:
    """Its numbers on a rank, how many hold the same with a part of the gradient, and whether it is cut."""
    partial = tensor.cut in ("kv_heads", "shared") or (sp and tensor.cut == "whole")
    cut = tp > 1 and tensor.cut not in ("shared", "whole")
    return math.prod(tensor.local_shape(tp)), tensor.copies(tp) if partial else 1, cut
