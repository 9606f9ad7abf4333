"""One loop, for the plain model in one process and for every cut of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from ..comm import ops
from ..model.transformer import Transformer
from ..parallel import execute, grads
from ..parallel.data import no_sync
from ..parallel.loss import valid_tokens
from .data import MicroBatch


class Step(NamedTuple):
    """What a step came to, the same on every rank: the mean loss of all its `tokens` (labels), in nats, before the
    update, and the norm of the gradients before clipping. A step whose norm is not finite changed nothing."""

    loss: float
    norm: float
    tokens: int


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Callable[[int, int, int], Sequence[MicroBatch]],
          steps: Iterable[int], data: dist.ProcessGroup | None = None, max_norm: float = 1.0,
          progress: bool = True, orders: execute.Orders | None = None) -> list[Step]:
    """Run the `steps`, numbers such as range(100), in training mode; returns what each came to.

    Every rank calls it. `data` is the group that the model is replicated or sharded over, None if it is not.
    `batches(step, coordinate, size)` are the micro-batches of one rank on the data axis, the same number on all: a
    `Batches`, or a function. `orders` is the schedule that a model cut over a pipeline runs, for as many of them. The
    first rank shows the progress. Raises ValueError where the model's data axis is another than `data`, where the
    optimizer lacks a trained parameter or has one of another model, on a schedule without backward, on a step without
    labels, and as `execute.run` does.
    """
    _check(model, optimizer, data)
    if orders is not None and not execute.backward(orders):
        raise ValueError("this schedule has no backward passes, and would train nothing: forward_only is to evaluate")
    coordinate, size = (0, 1) if data is None else (data.rank(), data.size())
    model.train()
    shows = progress and not (dist.is_initialized() and dist.get_rank())
    done = []
    with tqdm(steps, unit="step", disable=not shows) as bar:
        for number in bar:
            start = time.perf_counter()
            done.append(step(model, optimizer, batches(number, coordinate, size), data, max_norm, orders))
            loss, norm, tokens = done[-1]
            rate = tokens / (time.perf_counter() - start)
            bar.set_postfix_str(f"loss {loss:.4f}, norm {norm:.3g}, {rate:,.0f} tokens/s", refresh=False)
    return done


def step(model: nn.Module, optimizer: torch.optim.Optimizer, parts: Sequence[MicroBatch],
         data: dist.ProcessGroup | None = None, max_norm: float = 1.0, orders: execute.Orders | None = None) -> Step:
    """One step on the micro-batches `parts` of this rank: the loss of all ranks' tokens, weighted by token."""
    valid = valid_tokens((labels for _, labels in parts), data)
    if not valid:
        raise ValueError("no token of this step has a label: every label is -100, on all ranks")
    if orders is None:
        total = _accumulated(model, parts, valid)
    else:
        total = execute.run(cast(Transformer, model), orders, parts, valid)
    grads.finish(model)
    norm = grads.clip_grad_norm_(model, max_norm, error_if_nonfinite=False)
    if norm.isfinite():  # the same on every rank, so that all step or all skip
        optimizer.step()
    optimizer.zero_grad()
    return Step((total if data is None else ops.all_reduce(total, group=data)).item(), norm.item(), valid)


def _accumulated(model: nn.Module, parts: Sequence[MicroBatch], valid: int) -> torch.Tensor:
    """Forward and backward of one micro-batch after another; the sum of their losses."""
    device = next(model.parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for left, (tokens, labels) in zip(reversed(range(len(parts))), parts, strict=True):
        with no_sync(model) if left else nullcontext():  # gradients are summed over ranks with the last one
            loss = model.loss(tokens.to(device), labels.to(device), valid)  # type: ignore[operator]
            loss.backward()
        total += loss.detach()
    return total


def _check(model: nn.Module, optimizer: torch.optim.Optimizer, data: dist.ProcessGroup | None) -> None:
    """Raise ValueError where model, optimizer and data axis do not belong together, which nothing else would tell."""
    reducer = getattr(model, "reducer", None)
    theirs, ours = (None if group is None or group.size() == 1 else dist.get_process_group_ranks(group)
                    for group in (reducer and reducer.group, data))
    if theirs != ours:
        raise ValueError(f"the model's gradients are summed over ranks {theirs}, and data is ranks {ours}: replicate "
                         "or shard the model over the group that you give as data, which is None for a plain model")
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    missing = [name for name, each in model.named_parameters() if each.requires_grad and each not in held]
    if missing and not (reducer and reducer.shards):  # ZeRO has seen to that, and put slices in their place
        raise ValueError(f"the optimizer does not hold {missing[0]}, which is trained ({len(missing)} such): make it "
                         "after tensor.cut, which makes new parameters, or freeze what it should leave alone")
    foreign = held - set(model.parameters())
    if foreign and not (reducer and reducer.shards):
        raise ValueError(f"the optimizer holds {len(foreign)} parameters that the model has not: make it after "
                         "tensor.cut and pipeline.cut, or it keeps the whole model's memory")
