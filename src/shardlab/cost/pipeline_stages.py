"""What each stage of a pipeline keeps of a micro-batch, from its forward pass to the end of its backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..specs import ModelSpec
from ..specs.stages import split
from .activations import Activations
from .parameters import Stage
from .put_off import head_put_off, layer_put_off
from .saved import Term


@dataclass(frozen=True)
class StageBill:
    """Bytes that a stage keeps of one micro-batch: `kept` from its forward pass to B or I; `put_off` from I to W, the
    inputs of its matrices and the gradients of their outputs. While B or I runs it has up to `passing` more."""

    stage: Stage
    kept: int
    put_off: int
    passing: int


def stages_of(spec: ModelSpec, count: int, weights: Sequence[float] | None = None) -> list[Stage]:
    """The `count` stages of the model, cut as `parallel.pipeline.cut` does."""
    layers = split(spec.layers, count, weights)
    return [Stage(i, layers[i], i == 0, i == count - 1) for i in range(count)]


def stage_bill(stage: Stage, whole: Activations, halves: bool) -> StageBill:
    """Of `whole`, what the model that is not cut keeps, the stage's part. `halves` says whether there is an I and a W.

    To its layers comes the input that it has received, where its first norm does not keep that anyway, and positions,
    which each stage turns by for itself; the first keeps token ids, the last what norm, head and loss do.
    """
    saved = whole.saved
    dense = whole.kinds[0][0]  # layers of the first kind come first
    terms = [term for layer in stage.layers for term in whole.kinds[0 if layer < dense else -1][1]]
    if stage.last:
        terms += [*saved.head(), *saved.loss(valid=True), Term("loss", 1, 1, saved.precise, "sum")]
    if not stage.first and not (terms and terms[0].width == saved.width):
        terms.append(saved.stream())  # else the first term is the input as it is
    terms += saved.rotation() if stage.layers else []
    terms += saved.embedding() if stage.first else []
    kept = sum(term.nbytes for term in terms)
    mixed = saved.spec.experts.first_dense if saved.spec.experts else saved.spec.layers
    put_off = [term for layer in stage.layers for term in layer_put_off(saved, layer >= mixed)] if halves else []
    put_off += head_put_off(saved) if halves and stage.last else []
    again = whole.recomputed if stage.layers else 0
    loss = whole.logits - whole.loss if stage.last else 0
    # the loss's own is let go before a layer is computed again
    passing = max(loss, again - whole.loss if stage.last else again, 0)
    return StageBill(stage, kept, sum(term.nbytes for term in put_off), passing)
