"""shardlab's ways: each a plain model and optimizer, one verb, and the same step for all."""

from __future__ import annotations

from functools import partial

import torch

from shardlab.parallel import data, grads, tensor, zero

from .model import BATCH, SEQ, Step, adamw, batch, model


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
        **{f"TP+SP {mode}": partial(tensors, sequence_parallel=mode) for mode in ("keep", "again")}}
