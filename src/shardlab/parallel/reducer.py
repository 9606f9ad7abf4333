"""Gradients leave while backward still runs: a bucket is sent as soon as the last of its gradients is there.

Autograd calls a hook when a parameter's gradient is complete. Backward goes through the model from its end, so the last
parameters are the first to be ready, and the first buckets hold them. Buckets are sent in this order on all ranks,
whatever order their gradients come in: ranks that send different buckets at a time would add up different things.
(PyTorch's DDP works the same way: Li et al., arXiv:2006.15704, §3.2.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import nn

from ..comm import ops
from .flat import Flat


class Bucket:
    """The gradients of one row of parameters: as views of one piece of memory, once they have been accumulated."""

    def __init__(self, flat: Flat):
        self.flat = flat
        self.row: torch.Tensor | None = None
        self.ready: set[nn.Parameter] = set()  # whose gradients are complete, in the backward pass that sends them
        self.sent = None  # the handle of the collective under way

    @property
    def complete(self) -> bool:
        """Whether all its gradients are there."""
        return len(self.ready) == len(self.flat.parameters)

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter's gradient stands in the row."""
        return (self.row is not None and parameter.grad is not None
                and parameter.grad.data_ptr() == self.flat.view(self.row, parameter).data_ptr())

    def take(self, parameter: nn.Parameter) -> None:
        """Move the parameter's gradient into the row, if it does not stand there."""
        if not self.has(parameter):
            self.row = self.flat.empty() if self.row is None else self.row
            place = self.flat.view(self.row, parameter)
            place.copy_(parameter.grad)  # type: ignore[arg-type]
            parameter.grad = place

    def fill(self) -> None:
        """Put zeros where there is no gradient."""
        self.row = self.flat.empty() if self.row is None else self.row
        for parameter in self.flat.parameters:
            if parameter.grad is None:
                parameter.grad = self.flat.view(self.row, parameter).zero_()


class Reducer:
    """Sums the gradients of `flats`, the rows in the order in which they are sent, over the ranks of `group`.

    On the model as `model.reducer`, where `grads` finds it. All ranks run the same number of backward passes.
    """

    shards = False  # whether each rank is left with a slice of the sum, or with all of it
    repeats = False  # whether every backward pass sends, or the last one before `finish` alone

    def __init__(self, flats: Sequence[Flat], group: dist.ProcessGroup):
        self.group = group
        self.buckets = [Bucket(flat) for flat in flats]
        self.holding = False  # inside no_sync: more backward passes will add to these gradients
        self.used: set[nn.Parameter] = set()  # that have got a gradient since the last `finish`
        self._of = {parameter: bucket for bucket in self.buckets for parameter in bucket.flat.parameters}
        self._pass = -1  # autograd's number of the backward pass under way, or of the last one
        self._running = False  # whether it has not come to its end, so that after an error it never will
        self._next, self._flushed = 0, False  # the bucket to be sent next; whether all have been, since `finish`
        self._stood = 0  # how often the weights had been changed when the last pass began
        # not by a strong reference: one from a parameter's hook to what holds the parameter, Python could never free
        accumulated = WeakMethod(self._accumulated)
        for parameter in self._of:
            parameter.register_post_accumulate_grad_hook(lambda each: (call := accumulated()) and call(each))

    def __deepcopy__(self, *_) -> Reducer:
        raise RuntimeError("a model with a data axis can't be copied: copy the plain one and cut the copy, or take its "
                           "state_dict (under ZeRO inside zero.gathered)")

    def __contains__(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter's gradient is one of those that are summed."""
        return parameter in self._of

    def send(self, bucket: Bucket):
        """Start the bucket's collective; returns its handle."""
        assert bucket.row is not None
        return ops.all_reduce(bucket.row, group=self.group, async_op=True)

    def settle(self, bucket: Bucket, result: torch.Tensor) -> None:
        """What is done with the collective's result when it is there."""

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """What this rank holds of the parameter's gradient: None if it holds nothing of it, or no rank has used it."""
        return parameter.grad

    def drop(self, parameter: nn.Parameter) -> None:
        """What is done with a parameter that no rank has used: it has no gradient, as in the plain model."""
        parameter.grad = None

    def finish(self) -> None:
        """Send what is left, wait for all of it, and tell apart what no rank has used from what has gradient 0."""
        if self._running:
            raise RuntimeError(FAILED)
        if self.left():
            raise RuntimeError(LEFT)
        if not self._flushed:  # this rank has had no backward pass that sends
            self._flush()
        for bucket in self.buckets:
            self.wait(bucket)
        parameters = list(self._of)
        used = torch.tensor([parameter in self.used for parameter in parameters], dtype=torch.uint8,
                            device=parameters[0].device if parameters else None)
        for parameter, some in zip(parameters, ops.all_reduce(used, "max", self.group).tolist(), strict=True):
            if not some:
                self.drop(parameter)
        self.used, self._flushed = set(), False

    def left(self) -> bool:
        """Whether gradients are there that have been summed already."""
        return not self.used and any(bucket.has(parameter) for parameter, bucket in self._of.items())

    def wait(self, bucket: Bucket) -> None:
        """Wait for what has been sent of the bucket, and settle it."""
        if bucket.sent is not None:
            result, bucket.sent = bucket.sent.wait(), None
            self.settle(bucket, result)

    def changes(self) -> int:
        """How often the weights have been changed."""
        return sum(parameter._version for parameter in self._of)

    def forget(self) -> None:
        """Wait for what is under way, and begin anew without it."""
        for bucket in self.buckets:
            if bucket.sent is not None:
                bucket.sent.wait()
                bucket.sent = None
        self.used, self._running, self._flushed, self._next = set(), False, False, 0

    def arrived(self) -> None:
        """Another gradient is there: send the buckets whose turn it is."""
        while self._next < len(self.buckets) and self.buckets[self._next].complete:
            self.send_next()

    def send_next(self) -> None:
        """Send the next bucket, with zeros for gradients that this pass has not come by."""
        bucket = self.buckets[self._next]
        bucket.fill()
        bucket.sent = self.send(bucket)
        self._next += 1

    def enter(self) -> None:
        """Called in backward: `begin`, if this is another pass than the last time."""
        if self._pass != (now := torch._C._current_graph_task_id()):
            self._pass = now
            self.begin()

    def begin(self) -> None:
        """A backward pass begins. Raises RuntimeError where it must not."""
        stand = any(bucket.has(parameter) for parameter, bucket in self._of.items())
        if self._running and (stand or self.repeats):
            raise RuntimeError(FAILED)
        if self._flushed and stand:
            raise RuntimeError("the gradients of this step have been sent already: call grads.finish before the next "
                               "backward, or run all but the last of several inside data.no_sync(model)")
        if not stand and not self.repeats:  # the first pass of a step, or zero_grad has thrown away those before it
            if self._flushed and self._stood != self.changes():
                raise RuntimeError("the weights have been changed by gradients that were not finished, so that "
                                   "replicas may differ: call grads.finish(model) before optimizer.step()")
            self.forget()
        self._stood = self.changes()
        self._running, self._next = True, 0
        for bucket in self.buckets:
            bucket.ready.clear()
        torch.autograd.Variable._execution_engine.queue_callback(self.end)

    def end(self) -> None:
        """The backward pass has come to its end."""
        self._running = False
        if self.repeats or not self.holding:
            self._flush()

    def _accumulated(self, parameter: nn.Parameter) -> None:
        """Autograd's hook: the gradient of the parameter is complete for this pass."""
        self.enter()
        bucket = self._of[parameter]
        if parameter not in self.used and bucket.has(parameter):
            raise RuntimeError(LEFT)
        bucket.take(parameter)
        self.used.add(parameter)
        if self.repeats or not self.holding:
            bucket.ready.add(parameter)
            self.arrived()

    def _flush(self) -> None:
        """Send the buckets that are left."""
        while self._next < len(self.buckets):
            self.send_next()
        if self.repeats:
            for bucket in self.buckets:
                self.wait(bucket)
        self._flushed, self._next = True, 0


FAILED = ("the last backward pass ended with an error, and what it has left of gradients is no use: call zero_grad() "
          "before the next one")
LEFT = ("gradients of the last step are still there: call grads.finish once a step, and before the next backward "
        "optimizer.zero_grad(), which sets them to None")


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backward passes in the block add to the gradients on each rank and send nothing: all but the last of a step.

    What counts is where backward runs; forward may be inside too, as PyTorch's DDP wants it. Under ZeRO-2 and 3, which
    hold no whole gradients, each pass sends all the same. A model without a data axis has nothing to send.
    """
    reducer = getattr(model, "reducer", None)
    if reducer is None:
        yield
        return
    reducer.holding = True
    try:
        yield
    finally:
        reducer.holding = False
