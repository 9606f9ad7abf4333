"""ZeRO: ranks of the data axis hold slices of what each would hold whole (Rajbhandari et al., arXiv:1910.02054).

| stage | a rank holds a slice of      | what travels                                                                  |
|-------|------------------------------|-------------------------------------------------------------------------------|
| 1     | the optimizer's states       | gradients: reduce-scatter, once a step; weights: all-gather, after the update |
| 2     | and the gradients            | the same, but the reduce-scatter in every backward pass                       |
| 3     | and the weights              | weights: all-gather in forward and in backward; gradients: reduce-scatter     |

Parameters lie in rows, and a rank's slice of a row begins and ends anywhere. What the optimizer steps are the parts of
parameters in this rank's slices, each a parameter of its own: so groups keep their rates and their decay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import nn, optim

from ..comm import ops, phase
from ..model.parameters import off_meta
from ..model.transformer import Transformer
from ..specs.rows import BUCKET
from .data import agree, count, stay
from .flat import Flat, Slice, buckets
from .gathering import Gathering, Unit, alone
from .reducer import LEFT, Bucket, Reducer
from .zero_check import guard, refuse
from .zero_state import filled, gathered, held, load_state_dict, state_dict

__all__ = ["filled", "gathered", "held", "load_state_dict", "shard", "state_dict"]

LOW = (torch.bfloat16, torch.float16)  # too coarse for small updates: the optimizer steps float32 copies


def shard(model: Transformer, optimizer: optim.Optimizer, group: dist.ProcessGroup, stage: int,
          bucket_bytes: int = BUCKET, device: torch.device | str = "cpu") -> Transformer:
    """Cut what training holds over the group's ranks, in place in `model` and in `optimizer`; returns the model.

    Every rank of the group calls it, and from then on does the same: as many forward passes, backward passes and steps
    as the others, if need be on a batch without labels. Parameters and buffers become those of the group's first rank.
    Train as ever: backward, `grads.finish`, `grads.clip_grad_norm_`, `optimizer.step`, `optimizer.zero_grad`, which
    sets gradients to None. Stages 1 and 2 lay weights in rows of `bucket_bytes` at most. Weights of 16 bits get master
    copies in float32, which the optimizer steps. Parameters on meta get memory on `device`, of this rank's slices alone
    in stage 3, to be filled: see `held`. Experts that are spread over ranks (`expert.cut`) are left whole, and stepped
    whole. Raises ValueError on another stage, a model that has a data axis, an optimizer whose update is not element by
    element, that has begun, or that lacks a trained parameter, and with a pipeline in stages 2 and 3.
    """
    refuse(model, optimizer, stage)
    agree(model, group)
    count(model, group)
    left = alone(model)
    renewed = off_meta(model, device, lambda each: each not in left and (stage == 3 or each.requires_grad))
    for each in optimizer.param_groups:
        each["params"] = [renewed.get(parameter, parameter) for parameter in each["params"]]
    if stage == 3:
        reducer: Stage1 = Stage3(model, group)
    else:
        left = alone(model)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter not in left]
        pipeline = getattr(model, "pipeline", None)
        table = pipeline and pipeline.shared_table(model)  # in a row of its own: both ends cut it into the same slices
        rest, apart = ([each for each in trained if (each is table) is kind] for kind in (False, True))
        rows = [row for some in (rest[::-1], apart) for row in buckets(some, group.size(), bucket_bytes)]
        reducer = (Stage1 if stage == 1 else Stage2)(rows, group, Whole(rows, group))
    reducer.serve(optimizer, alone(model))
    model.reducer = reducer  # type: ignore[assignment]
    model.zero_grad = reducer.zero_grad  # type: ignore[method-assign]
    guard(reducer, model, optimizer)
    stay(model)
    return model


class Whole:
    """The trained weights under stages 1 and 2: all on every rank, each row one piece of memory."""

    def __init__(self, rows: Sequence[Flat], group: dist.ProcessGroup):
        self.group = group
        self.rows = {row: row.lay() for row in rows}  # (numel,)
        self.slices = {row: Slice(row, group.rank()) for row in rows}
        self.held = {row: self.slices[row].of(memory) for row, memory in self.rows.items()}  # (share,)
        self.opened = False

    def updated(self) -> None:
        """Each rank has changed its slices: all get all of them."""
        with phase("step"):
            sent = [ops.all_gather(self.held[row], self.group, async_op=True, out=memory)
                    for row, memory in self.rows.items()]
            for each in sent:
                each.wait()

    def open(self) -> None:
        self.opened = True  # and that is all: the weights are there

    def close(self) -> None:
        self.opened = False


class Stage1(Reducer):
    """Each rank has all weights and all gradients, and updates the weights of its slices."""

    shards = True
    partial = False  # whether a rank has only slices of the weights

    def __init__(self, rows: Sequence[Flat], group: dist.ProcessGroup, weights: Whole | Gathering):
        super().__init__(rows, group)
        self.weights = weights
        self.stepped: dict[nn.Parameter, nn.Parameter] = {}  # the part of a parameter that this rank's optimizer steps
        self.order: list[list[nn.Parameter]] = []  # the parameters of the optimizer's groups, before they were cut
        self.kept: list[nn.Parameter] = []  # those that are not cut
        self.finished = False  # and the gradients not zeroed yet
        self.whole = False  # while `zero_state` puts the optimizer's states together
        for row in rows:
            slice = weights.slices[row]
            for parameter in slice.spans:
                part = slice.part(weights.held[row], parameter)
                self.stepped[parameter] = nn.Parameter(part.float() if row.dtype in LOW else part)

    @property
    def low(self) -> bool:
        """Whether there are master copies, on whatever rank."""
        return any(dtype in LOW for dtype in [*(b.flat.dtype for b in self.buckets), *(p.dtype for p in self.kept)])

    def serve(self, optimizer: optim.Optimizer, left: set[nn.Parameter]) -> None:
        """Let the optimizer step this rank's parts instead of the parameters, and those that are `left` as they are."""
        self.order = [list(group["params"]) for group in optimizer.param_groups]
        self.kept = [each for group in self.order for each in group if each in left and each.requires_grad]
        for each in self.kept:
            self.stepped[each] = nn.Parameter(each.detach().float()) if each.dtype in LOW else each
        for group, whole in zip(optimizer.param_groups, self.order, strict=True):
            group["params"] = [self.stepped[parameter] for parameter in whole if parameter in self.stepped]
        optimizer.register_step_pre_hook(self.before_step)
        optimizer.register_step_post_hook(self.after_step)
        optimizer.zero_grad = self.zero_grad  # type: ignore[method-assign]  # which knows of more than the parts

    def send(self, bucket: Bucket):
        # one under way at a time, since gloo copies what it is given; stages 2 and 3 hold two rows at most so
        for other in self.buckets:
            self.wait(other)
        assert bucket.row is not None
        mine = None if self.repeats else self.weights.slices[bucket.flat].of(bucket.row)
        return ops.reduce_scatter(bucket.row, group=self.group, async_op=True, out=mine)

    def settle(self, bucket: Bucket, result: torch.Tensor) -> None:
        """Give the parts their gradients, in the parts' dtype."""
        slice = self.weights.slices[bucket.flat]
        for parameter in slice.spans:
            mine = self.stepped[parameter]
            part = slice.part(result, parameter).to(mine.dtype)
            mine.grad = part if mine.grad is None else mine.grad.add_(part)
        for parameter in bucket.flat.parameters:
            parameter.grad = None

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        return self.stepped[parameter].grad if parameter in self.stepped else None

    def drop(self, parameter: nn.Parameter) -> None:
        if parameter in self.stepped:
            self.stepped[parameter].grad = None

    def begin(self) -> None:
        if self.left():
            raise RuntimeError(LEFT)
        super().begin()

    def left(self) -> bool:
        return self.finished

    def finish(self) -> None:
        super().finish()
        self.finished = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The optimizer's: all gradients become None, sums that are not finished too."""
        self.forget()
        self.finished = False
        for bucket in self.buckets:
            bucket.row = None if self.repeats else bucket.row
        for parameter in (*self._of, *self.kept):
            parameter.grad = None
        for mine in self.stepped.values():
            mine.grad = None

    @torch.no_grad()
    def before_step(self, *_) -> None:
        """The master copies of what is not cut get its gradients."""
        for each in self.kept:
            if (mine := self.stepped[each]) is not each:
                mine.grad = None if each.grad is None else each.grad.float()

    @torch.no_grad()
    def after_step(self, *_) -> None:
        """What this rank has updated becomes the weights of all."""
        for parameter, part in self.copied():
            part.copy_(self.stepped[parameter])
        self.weights.updated()
        for parameter in self._of:  # so that a graph from before the update says that it is too late
            torch.autograd.graph.increment_version(parameter)

    def copied(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """The parts of 16 bits that have master copies: (parameter, its part of the weights)."""
        for bucket in self.buckets:
            slice = self.weights.slices[bucket.flat]
            for parameter in slice.spans if bucket.flat.dtype in LOW else ():
                yield parameter, slice.part(self.weights.held[bucket.flat], parameter)
        for parameter in self.kept:
            if parameter.dtype in LOW:
                yield parameter, parameter.detach()


class Stage2(Stage1):
    """Gradients are whole only until their bucket is sent, in each backward pass; what is kept is the slices' sum."""

    repeats = True

    def settle(self, bucket: Bucket, result: torch.Tensor) -> None:
        super().settle(bucket, result)
        bucket.row = None


class Stage3(Stage2):
    """Weights too are whole only while they are used: see `gathering`."""

    partial = True

    def __init__(self, model: Transformer, group: dist.ProcessGroup):
        self.gathering = Gathering(model, group, self.over)
        units = self.gathering.units[::-1]  # as backward comes by
        super().__init__([row for unit in units for row in unit.trained], group, self.gathering)
        ends = accumulate(len(unit.trained) for unit in units)
        self._end = dict(zip(units, ends, strict=True))  # the bucket after the unit's last

    def arrived(self) -> None:
        """A bucket waits until its unit is over."""

    def over(self, unit: Unit) -> None:
        """Send the gradients of the unit."""
        self.enter()
        while self._next < self._end[unit]:
            self.send_next()

    def end(self) -> None:
        super().end()
        self.gathering.free()

    def finish(self) -> None:
        super().finish()
        self.gathering.finish()
