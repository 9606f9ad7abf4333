"""What one micro-batch takes of a rank: of a layer, of an end of the model, of a stage that is made of them."""

from __future__ import annotations

from typing import NamedTuple

from ..specs import ModelSpec
from .parameters import Stage


class Pass(NamedTuple):
    """Of one micro-batch on one rank: FLOP of its forward pass; seconds of arithmetic `forward`, in the two halves of
    backward (`input`, `weight`) and for what is computed `again`; seconds of each axis's messages forward and `_back`,
    and bytes that they send inside a domain and between domains; and the numbers of parameters that the rank holds,
    which of them are of experts that lie over other ranks than the `rest`."""

    flop: float = 0.0
    forward: float = 0.0
    input: float = 0.0
    weight: float = 0.0
    again: float = 0.0
    tp: float = 0.0
    tp_back: float = 0.0
    cp: float = 0.0
    cp_back: float = 0.0
    ep: float = 0.0
    ep_back: float = 0.0
    tp_inside: float = 0.0
    tp_between: float = 0.0
    cp_inside: float = 0.0
    cp_between: float = 0.0
    ep_inside: float = 0.0
    ep_between: float = 0.0
    rest: float = 0.0
    spread: float = 0.0

    def plus(self, other: Pass, times: int = 1) -> Pass:
        """With `times` times the other."""
        return Pass(*[mine + times * theirs for mine, theirs in zip(self, other, strict=True)])

    @property
    def ahead(self) -> float:
        """Seconds of a forward pass, messages included."""
        return self.forward + self.tp + self.cp + self.ep

    @property
    def back(self) -> float:
        """Seconds of the input's half of a backward pass, messages and what is computed again included."""
        return self.again + self.input + self.tp_back + self.cp_back + self.ep_back


class Shape(NamedTuple):
    """How many layers a stage has, dense and with experts; which ends; whether it has a second embedding's weight."""

    dense: int
    mixture: int
    first: bool
    last: bool
    table: bool


class Kinds(NamedTuple):
    """The passes of what stages are made of, and the numbers of an embedding."""

    dense: Pass
    mixture: Pass
    first: Pass
    last: Pass
    table: int

    def together(self, shape: Shape) -> Pass:
        """Of a stage."""
        made = Pass().plus(self.dense, shape.dense) if shape.dense else Pass()
        made = made.plus(self.mixture, shape.mixture) if shape.mixture else made
        made = made.plus(self.first) if shape.first else made
        made = made.plus(self.last) if shape.last else made
        return made._replace(rest=made.rest + self.table) if shape.table else made


def shape_of(stage: Stage, spec: ModelSpec) -> Shape:
    """What the stage is made of; a last one has the embedding's weight too, where the head is tied to it."""
    first_mixture = spec.experts.first_dense if spec.experts else spec.layers
    dense = sum(layer < first_mixture for layer in stage.layers)
    table = spec.tied and stage.last and not stage.first
    return Shape(dense, len(stage.layers) - dense, stage.first, stage.last, table)
