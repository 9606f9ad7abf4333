"""shardlab's ways: each a plain model and optimizer, one verb, and the same step for all."""

from __future__ import annotations

from functools import partial

import torch

from shardlab.parallel import data, execute, grads, layout, pipeline, tensor, zero
from shardlab.schedule import SCHEDULES
from shardlab.specs import Layout

from .model import BATCH, MICROBATCHES, SEQ, Step, adamw, batch, model


def replicated(group) -> Step:
    cut = data.replicate(model(), group)
    return _step(cut, adamw(cut.parameters()), *batch(group.rank(), group.size()))


def sharded(group, stage: int) -> Step:
    plain = model()
    optimizer = adamw(plain.parameters())
    return _step(zero.shard(plain, optimizer, group, stage), optimizer, *batch(group.rank(), group.size()))


def tensors(group, sequence_parallel=False) -> Step:
    cut = tensor.cut(model(), group, sequence_parallel)
    step = _step(cut, adamw(cut.parameters()), *batch())
    return lambda: step() / group.size()  # every rank has the whole loss


def piped(group, schedule: str) -> Step:
    orders = SCHEDULES[schedule](group.size(), MICROBATCHES)
    cut = pipeline.cut(model(), group, orders)
    step = _pipelined(cut, adamw(cut.parameters()), orders, MICROBATCHES)
    return lambda: step() / group.size()  # every rank has the whole loss


def laid_out(group, how: Layout) -> Step:
    """Several axes at once, by `parallel.layout`."""
    cut, optimizer, axes = layout.cut(model(), how, adamw)
    assert optimizer is not None
    if how.orders is not None:
        step, alike = _pipelined(cut, optimizer, how.orders, how.microbatches), how.world_size
    else:
        step, alike = _step(cut, optimizer, *batch(axes.data.rank(), axes.data.size())), how.tp
    return lambda: step() / alike  # so many ranks have the same part of the loss


def _pipelined(cut, optimizer, orders, count: int) -> Step:
    parts = [batch(part, count) for part in range(count)]

    def step() -> torch.Tensor:
        loss = execute.run(cut, orders, parts)
        grads.finish(cut)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def _step(cut, optimizer, tokens, labels) -> Step:
    def step() -> torch.Tensor:
        loss = cut.loss(tokens, labels, BATCH * SEQ)
        loss.backward()
        grads.finish(cut)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


WAYS = {"DP": replicated, **{f"ZeRO-{stage}": partial(sharded, stage=stage) for stage in (1, 2, 3)}, "TP": tensors,
        **{f"TP+SP {mode}": partial(tensors, sequence_parallel=mode) for mode in ("keep", "again")},
        "GPipe": partial(piped, schedule="gpipe"), "1F1B": partial(piped, schedule="1f1b"),
        "interleaved": partial(piped, schedule="interleaved"), "zero bubble": partial(piped, schedule="zero_bubble"),
        **{f"dp2·tp2{', SP' * bool(sp)}": partial(laid_out, how=Layout(2, dp=2, zero=3, sp=sp))
           for sp in (False, "keep")},
        **{f"tp2·pp2{', SP' * bool(sp)}": partial(laid_out, how=Layout(2, pp=2, sp=sp, microbatches=8))
           for sp in (False, "keep")}}
