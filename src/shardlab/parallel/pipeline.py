"""Pipeline parallelism: each rank has some of the layers, and hands what they put out to the rank of the next ones.

Nothing is summed: what travels is the stream between two blocks, forward, and its gradient, backward. That it does not
take as long as one rank after the other is the schedule's work (`schedule`), which `execute` does action by action.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrize

from ..comm import ops, phase
from ..model.transformer import Transformer
from ..schedule import Orders, check, placement
from ..specs import padded
from ..specs.stages import split
from . import grads, mesh
from .agreement import agree

__all__ = ["Pipeline", "Stage", "cut"]


@dataclass(frozen=True)
class Stage:
    """A stage of the model: the embedding if it is the first, some layers, norm and head if it is the last."""

    number: int
    layers: range
    first: bool
    last: bool


class Pipeline:
    """The group that a model is cut over, the stages of all its ranks, and what this rank runs of them."""

    def __init__(self, model: Transformer, group: dist.ProcessGroup, stages: Sequence[Sequence[int]],
                 layers: Sequence[range]):
        self.group, self.stages = group, [list(each) for each in stages]
        self.count = len(layers)
        self.ranks = dist.get_process_group_ranks(group)
        self.mine = {number: Stage(number, layers[number], number == 0, number == self.count - 1)
                     for number in self.stages[group.rank()]}
        # a tied embedding on two ranks, which both have a part of its gradient
        self.shares_ends = model.lm_head.weight is model.embed_tokens.weight and self.rank_of(0) != self.rank_of(
            self.count - 1)
        self.hidden = model.spec.hidden
        # with sequence parallelism a rank of the tensor axis has a slice of the stream
        self._slices = getattr(model.embed_tokens, "group", None) if getattr(model.embed_tokens, "mode", 0) else None

    def rank_of(self, stage: int) -> int:
        """The global rank that has the stage."""
        return self.ranks[next(rank for rank, stages in enumerate(self.stages) if stage in stages)]

    def shared_table(self, model: Transformer) -> nn.Parameter | None:
        """The tied embedding, where this rank and another one have it."""
        end: nn.Embedding | nn.Linear | None = model.embed_tokens or model.lm_head
        return end.weight if self.shares_ends and end is not None else None  # type: ignore[return-value]

    def stream(self, model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        """Room for the stream of `tokens` (batch, seq): (batch, seq, hidden), or a slice of its rows."""
        shape = tuple(tokens.shape)
        if self._slices is not None:
            p = self._slices.size()
            shape = padded(tokens.numel(), p) // p,
        return tokens.new_empty(*shape, self.hidden, dtype=_dtype(model))


def _dtype(model: nn.Module) -> torch.dtype:
    """The stream's: that of matrices, for norms may be kept finer; where they are quantised, that of the rest."""
    plain = (module for module in model.modules() if not parametrize.is_parametrized(module))
    matrices = (module.weight for module in plain if isinstance(module, (nn.Linear, nn.Embedding)))
    some = next(matrices, next(model.parameters(), None))
    return (model.get_buffer("stream_like") if some is None else some).dtype


def cut(model: Transformer, group: dist.ProcessGroup, orders: Orders | None = None,
        weights: Sequence[float] | None = None) -> Transformer:
    """Take away the layers that other ranks of the group have, in place, and return the model.

    Every rank calls it, on a plain model or one cut over other axes, whole or on the meta device. `orders` is the
    schedule that it will run: which stages a rank has can be read from it; without one, rank r has stage r. Stages get
    layers by `weights`, see `specs.stages.split`; what is left keeps the whole model's names. Then make the optimizer,
    train with `execute.run`, and call `grads.finish(model)`. A tied embedding that first and last stage need is on both
    ranks, the same as on the first.

    A rank that gets no layers has no parameters; an optimizer of none is `AdamW([{"params": []}])`. Raises ValueError
    on a model that has a pipeline or a data axis already, or is quantised, on other `weights` than `split` takes, where
    schedule and group differ in ranks, where a stage is on several ranks, and, on all ranks, where they differ in
    model, schedule or `weights`.
    """
    if hasattr(model, "pipeline"):
        raise ValueError("this model has a pipeline already: cut the one without")
    if hasattr(model, "reducer"):
        raise ValueError("this model has a data axis, which holds its parameters: cut it before that")
    if any(parametrize.is_parametrized(module) for module in model.modules()):
        raise ValueError("this model is quantised: cut the plain one, then quantise each part")
    if orders is not None:
        check(orders)
    stages = [[rank] for rank in range(group.size())] if orders is None else placement(orders)
    if len(stages) != group.size():
        raise ValueError(f"the schedule is for {len(stages)} ranks, and the group has {group.size()}")
    numbers = sorted(number for each in stages for number in each)
    if numbers != list(range(len(set(numbers)))):
        raise ValueError(f"the ranks have stages {stages}: each must be on one rank (DualPipe has two copies of the "
                         "model; dualpipe_v runs as well with one)")
    layers = split(len(model.layers), len(numbers), weights)
    with phase("start"):
        agree(repr((model.spec, model.rules, stages, layers)).encode(), group, "cuts")
    pipeline = Pipeline(model, group, stages, layers)
    # for a rank without layers: `model.to` converts it as it does the others' weights
    model.register_buffer("stream_like", model.embed_tokens.weight.new_empty(0), persistent=False)
    _share_ends(model, pipeline)
    held = {layer for stage in pipeline.mine.values() for layer in stage.layers}
    # a dictionary, so that layer 7 is layers.7 wherever it is
    model.layers = nn.ModuleDict({str(i): layer for i, layer in enumerate(model.layers) if i in held})  # type: ignore
    first, last = (number in pipeline.mine for number in (0, pipeline.count - 1))
    if not first and not (last and pipeline.shares_ends):
        model.embed_tokens = None  # type: ignore[assignment]
    if not last:
        model.norm = model.lm_head = None  # type: ignore[assignment]
    model.pipeline = pipeline  # type: ignore[assignment]
    model.stream = model.hidden = _refuse  # type: ignore  # which loss, logits and generate all begin with
    return model


@torch.no_grad()
def _share_ends(model: Transformer, pipeline: Pipeline) -> None:
    """A tied embedding on two ranks: one value, and each has a part of its gradient."""
    first, last = pipeline.rank_of(0), pipeline.rank_of(pipeline.count - 1)
    if not pipeline.shares_ends:
        return
    if (ends := mesh.some(pipeline.group, (first, last))) is None:
        return
    table = model.embed_tokens
    for module in (table, model.lm_head):  # a tensor axis has marked both
        known = getattr(module, "marks", {}).get("weight", grads.Mark())
        grads.mark(module, cut=known.cut, partial=ends)
    if not table.weight.is_meta:
        with phase("start"):
            ops.broadcast(table.weight.detach(), first, ends)


def _refuse(*_, **__) -> None:
    raise RuntimeError("this rank has some of the layers alone: run the model with execute.run(model, schedule, "
                       "parts), or execute.logits, on all ranks of its pipeline")
