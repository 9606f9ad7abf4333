"""One loop, for the plain model in one process and for every cut of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from ..comm import ops
from ..model.head import IGNORED
from ..model.router import Routing
from ..model.transformer import Transformer
from ..parallel import balance, execute, grads, rng
from ..parallel.data import no_sync
from ..parallel.loss import valid_tokens
from . import rates
from .data import MicroBatch
from .log import Log, said
from .memory import held


class Step(NamedTuple):
    """What a step came to, the same on every rank: the mean loss of all its `tokens` (labels), in nats, before the
    update, and the norm of the gradients before clipping. A step whose norm is not finite changed nothing. `loads` are
    how many tokens chose each expert, by layer, and `dropped` how many of these choices found it full."""

    loss: float
    norm: float
    tokens: int
    loads: tuple[tuple[int, ...], ...] = ()
    dropped: int = 0

    @property
    def skew(self) -> float:
        """The load of the busiest expert ÷ the mean, in the layer where that is largest; 0 without experts."""
        return max((max(layer) * len(layer) / max(1, sum(layer)) for layer in self.loads), default=0.0)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Callable[[int, int, int], Sequence[MicroBatch]],
          steps: Iterable[int], data: dist.ProcessGroup | None = None, max_norm: float = 1.0,
          progress: bool = True, orders: execute.Orders | None = None, bias_rate: float | None = None, *, seed: int = 0,
          rate: Callable[[int], float] | None = None, log: str | Path | None = None,
          after: Callable[[int, Step], object] | None = None) -> list[Step]:
    """Run the `steps`, numbers such as range(100), in training mode; returns what each came to.

    Every rank calls it. `data` is the group that the model is replicated or sharded over, None if it is not.
    `batches(step, coordinate, size)` are the micro-batches of one rank on the data axis, the same number on all: a
    `Batches`, or a function. Ranks that share a sequence, neighbours on that axis, have one coordinate. `orders` is the
    schedule that a model cut over a pipeline runs, for as many of them. With a `bias_rate`, about 0.001, each step
    moves the experts' biases towards even loads: see `balance.even`.

    What a step draws at random depends on `seed`, its number and the rank's place alone (`rng.seed`), and its rates are
    `rate(number)` times the groups' initial ones (`rates`): a run taken up at a step goes on as if it had never ended.
    The first rank shows the progress, and writes a line for each step to the file `log` (`log.Log`). `after(number,
    step)` is called on every rank after each step: to save, say.

    Raises ValueError where the model's data axis is another than `data`, where the optimizer lacks a trained parameter
    or has one of another model, on a schedule without backward, on a step without labels, and as `execute.run` and
    `balance.even` do.
    """
    _check(model, optimizer, data)
    if bias_rate is not None:
        balance.check(cast(Transformer, model), bias_rate)
    if orders is not None and not execute.backward(orders):
        raise ValueError("this schedule has no backward passes, and would train nothing: forward_only is to evaluate")
    coordinate, size = (0, 1) if data is None else (x // _sharers(model) for x in (data.rank(), data.size()))
    model.train()
    first = not (dist.is_initialized() and dist.get_rank())
    written = Log(log) if first and log is not None else None
    done: list[Step] = []
    with tqdm(steps, unit="step", disable=not (first and progress)) as bar:
        for number in bar:
            start = time.perf_counter()
            rng.seed(model, seed, coordinate, number)
            if rate is not None:
                rates.apply(optimizer, rate(number))
            done.append(step(model, optimizer, batches(number, coordinate, size), data, max_norm, orders, bias_rate))
            if first:
                told = _record(number, done[-1], time.perf_counter() - start, model, optimizer)
                bar.set_postfix_str(said(told), refresh=False)
                if written is not None:
                    written.write(told)
            if after is not None:
                after(number, done[-1])
    return done


def _record(number: int, done: Step, seconds: float, model: nn.Module, optimizer: torch.optim.Optimizer
            ) -> dict[str, Any]:
    """A step as the log has it."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return {"step": number, "loss": done.loss, "norm": done.norm, "tokens": done.tokens, "seconds": seconds,
            "tokens_per_second": done.tokens / seconds, "memory": held(device),
            "lr": float(optimizer.param_groups[0]["lr"]), "skew": done.skew}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, parts: Sequence[MicroBatch],
         data: dist.ProcessGroup | None = None, max_norm: float = 1.0, orders: execute.Orders | None = None,
         bias_rate: float | None = None) -> Step:
    """One step on the micro-batches `parts` of this rank: the loss of all ranks' tokens, weighted by token.

    Tokens after a sequence's last label are no part of it: they are padding to experts, which they are not sent to.
    """
    valid = valid_tokens((labels for _, labels in parts), data) // _sharers(model)  # which have the same labels
    if not valid:
        raise ValueError("no token of this step has a label: every label is -100, on all ranks")
    routed: list[Routing] = []
    real = [_there(labels) for _, labels in parts] if _has_experts(model) else None
    if orders is None:
        total = _accumulated(model, parts, valid, routed, real)
    else:
        total = execute.run(cast(Transformer, model), orders, parts, valid, routed, real)
    grads.finish(model)
    norm = grads.clip_grad_norm_(model, max_norm, error_if_nonfinite=False)
    if norm.isfinite():  # the same on every rank, so that all step or all skip
        optimizer.step()
    optimizer.zero_grad()
    loads: tuple[tuple[int, ...], ...] = ()
    dropped = 0
    if real is not None:
        moves = bias_rate is not None and norm.isfinite()
        told, dropped = (balance.even(cast(Transformer, model), routed, cast(float, bias_rate), data) if moves
                         else balance.loads(cast(Transformer, model), routed, data))
        loads = tuple(map(tuple, told.tolist()))
    loss = total if data is None else ops.all_reduce(total, group=data)
    return Step(loss.item(), norm.item(), valid, loads, dropped)


def _has_experts(model: nn.Module) -> bool:
    return getattr(getattr(model, "spec", None), "experts", None) is not None


def _there(labels: torch.Tensor) -> torch.Tensor:
    """(batch, seq) → which tokens a label of their sequence depends on: all up to the last one."""
    return (labels != IGNORED).flip(-1).cumsum(-1).flip(-1) > 0


def _sharers(model: nn.Module) -> int:
    """How many ranks share a sequence."""
    context = getattr(model, "context", None)
    return 1 if context is None else context.group.size()


def _accumulated(model: nn.Module, parts: Sequence[MicroBatch], valid: int, routed: list[Routing],
                 real: Sequence[torch.Tensor] | None) -> torch.Tensor:
    """Forward and backward of one micro-batch after another; the sum of their losses."""
    device = next(model.parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for i, (tokens, labels) in enumerate(parts):
        how = {} if real is None else {"routed": routed, "real": real[i].to(device)}
        with no_sync(model) if i < len(parts) - 1 else nullcontext():  # the last sums gradients over ranks
            loss = model.loss(tokens.to(device), labels.to(device), valid, **how)  # type: ignore[operator]
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
    if theirs and (context := getattr(model, "context", None)) is not None:
        p, sharers = context.group.size(), dist.get_process_group_ranks(context.group)
        if data is not None and theirs[data.rank() // p * p :][:p] != sharers:
            raise ValueError(f"ranks {sharers} share a sequence, and are no neighbours on the data axis, ranks "
                             f"{theirs}: take the axes of mesh.build(dp=…, cp={p}) and of mesh.build(data=…)")
    masters = getattr(model, "masters", None)  # which are stepped in place of their parameters
    groups = [group["params"] for group in optimizer.param_groups] if masters is None else masters.order
    held = {parameter for group in groups for parameter in group}
    missing = [name for name, each in model.named_parameters() if each.requires_grad and each not in held]
    if missing and not (reducer and reducer.shards):  # ZeRO has seen to that, and put slices in their place
        raise ValueError(f"the optimizer does not hold {missing[0]}, which is trained ({len(missing)} such): make it "
                         "after tensor.cut, which makes new parameters, or freeze what it should leave alone")
    foreign = held - set(model.parameters())
    if foreign and not (reducer and reducer.shards):
        raise ValueError(f"the optimizer holds {len(foreign)} parameters that the model has not: make it after "
                         "tensor.cut and pipeline.cut, or it keeps the whole model's memory")
