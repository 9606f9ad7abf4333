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

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn, optim

from ..comm import ops, phase
from ..specs.rows import BUCKET
from .data import agree
from .flat import Flat, Slice, buckets
from .reducer import Bucket, Reducer

# whose update of a number looks at this number, its gradient and its states alone, so that slices can be stepped
ELEMENTWISE = (optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.RMSprop,
               optim.Adadelta, optim.ASGD, optim.Rprop)
LOW = (torch.bfloat16, torch.float16)  # too coarse for small updates: the optimizer steps float32 copies


def shard(model: nn.Module, optimizer: optim.Optimizer, group: dist.ProcessGroup, stage: int,
          bucket_bytes: int = BUCKET) -> nn.Module:
    """Cut what training holds over the group's ranks, in place in `model` and in `optimizer`; returns the model.

    Every rank of the group calls it, and from then on does the same: as many forward passes, backward passes and steps
    as the others, if need be on a batch without labels. Parameters and buffers become those of the group's first rank.
    Train as ever: backward, `grads.finish`, `grads.clip_grad_norm_`, `optimizer.step`, `optimizer.zero_grad`, which
    sets gradients to None. Stages 1 and 2 lay weights in rows of `bucket_bytes` at most. Weights of 16 bits get master
    copies in float32, which the optimizer steps. Raises ValueError on another stage, a model that has a data axis,
    an optimizer whose update is not element by element, that has begun, or that does not hold the trained parameters.
    """
    _check(model, optimizer, stage)
    agree(model, group)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rows = buckets(trained[::-1], group.size(), bucket_bytes)
    reducer = (Stage1 if stage == 1 else Stage2)(rows, group)
    reducer.serve(optimizer)
    model.reducer = reducer  # type: ignore[assignment]
    return model


class Stage1(Reducer):
    """Each rank has all weights and all gradients, and updates the weights of its slices."""

    shards = True

    def __init__(self, rows: Sequence[Flat], group: dist.ProcessGroup):
        super().__init__(rows, group)
        self.slices = {row: Slice(row, group.rank()) for row in rows}
        self.weights = {row: row.lay() for row in rows}  # memory (numel,) of each row
        self.stepped: dict[nn.Parameter, nn.Parameter] = {}  # the part of a parameter that this rank's optimizer steps
        self.order: list[list[nn.Parameter]] = []  # the parameters of the optimizer's groups, before they were cut
        self.finished = False  # and the gradients not zeroed yet
        for row in rows:
            mine = self.held(row)
            for parameter in self.slices[row].spans:
                part = self.slices[row].part(mine, parameter)
                self.stepped[parameter] = nn.Parameter(part.float() if row.dtype in LOW else part)

    def held(self, row: Flat) -> torch.Tensor:
        """This rank's slice of the row's weights, (share,)."""
        return self.slices[row].of(self.weights[row])

    def serve(self, optimizer: optim.Optimizer) -> None:
        """Let the optimizer step this rank's parts instead of the parameters."""
        self.order = [list(group["params"]) for group in optimizer.param_groups]
        for group, whole in zip(optimizer.param_groups, self.order, strict=True):
            group["params"] = [self.stepped[parameter] for parameter in whole if parameter in self.stepped]
        optimizer.register_step_pre_hook(self.before_step)
        optimizer.register_step_post_hook(self.after_step)
        optimizer.zero_grad = self.zero_grad  # type: ignore[method-assign]  # which knows of more than the parts

    def send(self, bucket: Bucket):
        assert bucket.row is not None
        mine = self.slices[bucket.flat].of(bucket.row)
        return ops.reduce_scatter(bucket.row, group=self.group, async_op=True, out=mine)

    def settle(self, bucket: Bucket, result: torch.Tensor) -> None:
        """Give the parts their gradients, in the parts' dtype."""
        slice = self.slices[bucket.flat]
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
        if self.finished:
            raise RuntimeError("gradients of the last step are still there: call optimizer.zero_grad() before the next "
                               "backward")
        super().begin()

    def finish(self) -> None:
        super().finish()
        self.finished = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The optimizer's: all gradients become None, sums that are not finished too."""
        self.forget()
        self.finished = False
        for bucket in self.buckets:
            bucket.row = None if self.repeats else bucket.row
        for parameter in self._of:
            parameter.grad = None
        for mine in self.stepped.values():
            mine.grad = None

    def before_step(self, *_) -> None:
        """Raises RuntimeError where gradients are not finished: the optimizer would step some, or none."""
        if self.used:
            raise RuntimeError("the gradients are not summed yet: call grads.finish(model) before optimizer.step()")

    @torch.no_grad()
    def after_step(self, *_) -> None:
        """Every rank gets the weights that the others have updated."""
        self.round()
        with phase("step"):
            sent = [ops.all_gather(self.held(row), self.group, async_op=True, out=weights)
                    for row, weights in self.weights.items()]
            for each in sent:
                each.wait()
        for parameter in self._of:
            torch.autograd.graph.increment_version(parameter)  # a graph from before the step must not be used after it

    def round(self) -> None:
        """Bring the master copies into the weights."""
        for row, slice in self.slices.items():
            for parameter in slice.spans if row.dtype in LOW else ():
                slice.part(self.held(row), parameter).copy_(self.stepped[parameter])


class Stage2(Stage1):
    """Gradients are whole only until their bucket is sent, in each backward pass; what is kept is the slices' sum."""

    repeats = True

    def send(self, bucket: Bucket):
        for other in self.buckets:  # one under way at a time, so that two rows of gradients are held at most
            self.wait(other)
        assert bucket.row is not None
        return ops.reduce_scatter(bucket.row, group=self.group, async_op=True)

    def settle(self, bucket: Bucket, result: torch.Tensor) -> None:
        super().settle(bucket, result)
        bucket.row = None


def _check(model: nn.Module, optimizer: optim.Optimizer, stage: int) -> None:
    """Raise ValueError where `shard` can't."""
    if stage not in (1, 2, 3):
        raise ValueError(f"ZeRO has stages 1, 2 and 3, not {stage!r}")
    if hasattr(model, "reducer"):
        raise ValueError("this model has a data axis already: shard the one without")
    kind = type(optimizer).__name__
    if type(optimizer) not in ELEMENTWISE:
        raise ValueError(f"the ranks would step slices, which cut through matrices, and {kind} may look at a whole one "
                         "(as LBFGS, Adafactor and Muon do); updates known to be element by element are those of "
                         + ", ".join(each.__name__ for each in ELEMENTWISE))
    if optimizer.state:
        raise ValueError(f"this {kind} has begun: shard before the first step, then zero.load_state_dict brings its "
                         "states back")
    names = {parameter: name for name, parameter in model.named_parameters()}
    held = {parameter: None for group in optimizer.param_groups for parameter in group["params"]}
    if foreign := [parameter for parameter in held if parameter not in names]:
        raise ValueError(f"this {kind} has {len(foreign)} parameters that the model has not, the first of shape "
                         f"{tuple(foreign[0].shape)}: make it of the model's parameters, after tensor.cut")
    if missing := [name for parameter, name in names.items() if parameter.requires_grad and parameter not in held]:
        raise ValueError(f"this {kind} does not hold {missing[0]}, which is trained ({len(missing)} such): freeze it "
                         "with requires_grad_(False)")
