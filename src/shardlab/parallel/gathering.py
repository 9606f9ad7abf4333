"""ZeRO-3's weights: each rank keeps a slice, and all gather a block's weights when it runs, and free them after.

A unit is what is gathered together: the embedding, a block, or the last norm with the head. While one computes, the
next one's all-gather is under way already. Backward gathers the blocks once more, from the last to the first; norm and
head are kept from forward until then, and an embedding needs no weights in backward. Tied to the head, it is one unit
with norm and head, gathered for the embedding and again for the head.

Autograd keeps views of the weights, so each row keeps its tensor and loses only its memory while it is free; the
parameters then stand for nothing and read as nan.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Iterator
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from ..comm import ops
from ..model.router import Router
from ..model.transformer import Transformer
from . import grads
from .flat import Slice, buckets


class Unit:
    """Parameters that are gathered and freed together; those that are frozen lie in rows of their own."""

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup):
        self.group = group
        self.trained, frozen = (buckets([p for p in parameters if p.requires_grad is kind], group.size(), sys.maxsize)
                                for kind in (True, False))
        self.rows = {row: row.lay() for row in [*self.trained, *frozen]}  # (numel,), without memory while it is free
        self.slices = {row: Slice(row, group.rank()) for row in self.rows}
        self.held = {row: self.slices[row].of(memory).clone() for row, memory in self.rows.items()}  # (share,)
        self.views = [(each, each.data, torch.full((), math.nan, dtype=row.dtype, device=row.device).expand(each.shape))
                      for row in self.rows for each in row.parameters]
        self.sent: list = []  # the handles of the gathers under way
        self.there = True
        self.kept = False  # by `Gathering.open`: whole until that is over
        self.free()

    def fetch(self) -> None:
        """Start the gathers, unless the weights are there or on their way."""
        if self.there or self.sent:
            return
        for row, memory in self.rows.items():
            memory.untyped_storage().resize_(memory.nbytes)
            self.sent.append(ops.all_gather(self.held[row], self.group, async_op=True, out=memory))

    @torch.no_grad()
    def wait(self) -> None:
        """Have the weights in the parameters."""
        self.fetch()
        for handle in self.sent:
            handle.wait()
        if not self.there:
            for parameter, whole, _ in self.views:
                parameter.data = whole
        self.sent, self.there = [], True

    @torch.no_grad()
    def free(self) -> None:
        """Give the memory back."""
        if self.kept or not (self.there or self.sent):
            return
        for handle in self.sent:  # memory that a gather still writes to can't be given back
            handle.wait()
        for parameter, _, nothing in self.views:
            parameter.data = nothing
        for memory in self.rows.values():
            memory.untyped_storage().resize_(0)
        self.sent, self.there = [], False


class Gathering:
    """The units of `model` in the order in which forward comes by, and the hooks that have them there in time.

    `over(unit)` is called in backward when the unit's gradients are complete: at the same point on all ranks, whatever
    each of them has used, so that they start their collectives in one order.
    """

    def __init__(self, model: Transformer, group: dist.ProcessGroup, over: Callable[[Unit], None]):
        self.units = [Unit(parameters, group) for parameters in parts(model)]
        embedding, *rest = self.units
        self.order = self.units if len(rest) > len(model.layers) else [*self.units, embedding]  # which tied is last too
        self.slices = {row: slice for unit in self.units for row, slice in unit.slices.items()}
        self.held = {row: held for unit in self.units for row, held in unit.held.items()}
        self.opened = False
        self._over = over
        # the runs that backward has yet to come by; those whose graph is thrown away are forgotten
        self._left: dict[Unit, WeakSet[_Run]] = {unit: WeakSet() for unit in self.units}
        for i, module in enumerate((model.embed_tokens, *model.layers, model.norm)):
            self._hook(module, i, lasts=module is model.norm)
        self._hook(model.lm_head, len(self.order) - 1)

    def free(self) -> None:
        """Give all memory back."""
        for unit in self.units:
            unit.free()

    def updated(self) -> None:
        """The slices have changed: what is gathered is not the weights any more."""
        self.free()

    def finish(self) -> None:
        """No backward pass is to come of what forward has done."""
        for runs in self._left.values():
            runs.clear()

    def open(self) -> None:
        """Gather everything, until `close`."""
        for unit in self.units:
            unit.fetch()
        for unit in self.units:
            unit.wait()
            unit.kept = True
        self.opened = True

    @torch.no_grad()
    def close(self) -> None:
        """Take this rank's slices of what the weights are now, and free them."""
        self.opened = False
        for unit in self.units:
            for row, memory in unit.rows.items():
                unit.held[row].copy_(unit.slices[row].of(memory))
            unit.kept = False
            unit.free()

    def _hook(self, module: nn.Module, i: int, lasts: bool = False) -> None:
        """Have unit `i` there when `module` runs, and again for its backward; free it after, unless it `lasts`."""

        def before(*_) -> None:
            if i == 0:  # what a forward pass has left whose graph was thrown away
                if any(self._left.values()):  # after an error a graph may lie in a cycle: on all ranks it goes now,
                    gc.collect()  # not when each one's collector comes by, or they would gather different units
                for unit in self.units:
                    if not self._left[unit]:
                        unit.free()
            self.order[i].wait()
            if i + 1 < len(self.order):
                self.order[i + 1].fetch()

        def after(_module, _args, output: torch.Tensor) -> None:
            if output.requires_grad:
                run = _Run()
                if i > 0:
                    self._left[self.order[i]].add(run)
                output.register_hook(lambda _: self._backward(i, run))
            if not lasts and not (output.requires_grad and i == len(self.order) - 1):
                self.order[i].free()

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def _backward(self, i: int, run: _Run) -> None:
        """Backward comes to a run of unit `i`, and is through with those after it. The embedding, 0, needs no weights
        for it."""
        self._left[self.order[i]].discard(run)
        for later in reversed(self.order[i + 1 :]):
            if self._left[later]:  # it has run more than once, and backward goes through all of that
                break
            if later is not self.order[0]:
                self._over(later)
        needed = [self.order[i]] if i > 0 else []
        if i > 1 and self._left[self.order[i - 1]]:  # else no gradient goes there
            needed.append(self.order[i - 1])
        for other in self.units:
            if other not in needed:
                other.free()
        if needed:
            needed[0].wait()
            needed[-1].fetch()


class _Run:
    """One forward pass of a unit; it lives as long as the graph that it is a part of."""


def alone(model: nn.Module) -> set[nn.Parameter]:
    """What ZeRO cuts in no stage: experts, which are spread over ranks already, and the few numbers that a router
    balances its loads by, which change between steps."""
    biases = {module.e_score_correction_bias for module in model.modules() if isinstance(module, Router)}
    return grads.spread(model) | {each for each in biases if each is not None}


def parts(model: Transformer) -> Iterator[list[nn.Parameter]]:
    """The parameters of each unit: the embedding's, each block's, and all others; the first two in one where they are
    tied; without those left `alone`. Raises ValueError where blocks share parameters."""
    left = alone(model)
    blocks = [[parameter for parameter in layer.parameters() if parameter not in left] for layer in model.layers]
    inside = {parameter for block in blocks for parameter in block}
    if len(inside) < sum(map(len, blocks)):
        raise ValueError("blocks share parameters, and ZeRO-3 gathers each block's for itself: take stage 2")
    table = list(model.embed_tokens.parameters())
    inside |= left
    ends = [parameter for parameter in model.parameters() if parameter not in inside and parameter not in set(table)]
    tied = model.lm_head.weight is model.embed_tokens.weight
    yield table + ends if tied else table
    yield from blocks
    if not tied:
        yield ends
