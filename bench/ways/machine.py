"""What ranks measure of the machine, all at once, and the steps of training that are held against what that predicts.

Call these functions by the module, or they travel, and what a rank has made is not there any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from shardlab import comm
from shardlab.model import Transformer, initialise
from shardlab.parallel import layout
from shardlab.specs import Layout, ModelSpec
from shardlab.train import Batches, step, text

WINDOW = 0.4  # seconds for which a rank repeats what is measured

_steps: dict[str, Callable[[], object]] = {}  # this rank's, by the name of their case


def ready(group, name: str, spec: ModelSpec, how: Layout, batch: int, seq: int, way: dict) -> None:
    """Make the case: `batch` sequences a step over all replicas, real text, AdamW; and take a step of it, which makes
    the optimizer's states and whatever it takes to send as `way` says (`comm.use`)."""
    model, optimizer, axes = layout.cut(_model(spec), how, _adamw)
    assert optimizer is not None
    draw = Batches(text(), seq, batch, how.microbatches)
    parts, orders = draw(0, how.place(group.rank())["dp"], how.dp), how.orders
    _steps[name] = lambda: step(model, optimizer, parts, axes.data, orders=orders)
    turn(group, name, way)


def plain(group, name: str, spec: ModelSpec, batch: int, seq: int) -> None:
    """The same without a cut: each rank on its own, on `batch` sequences."""
    model = _model(spec)
    optimizer, parts = _adamw(model.parameters()), Batches(text(), seq, batch)(0)
    _steps[name] = lambda: step(model, optimizer, parts)
    turn(group, name)


def turn(group, name: str, way: dict | None = None) -> float:
    """Seconds of a step of the case, after all ranks have met."""
    dist.barrier()
    start = time.perf_counter()
    with comm.use(**(way or {})):
        _steps[name]()
    return time.perf_counter() - start


def messages(group, sizes: Sequence[int], way: dict) -> list[tuple[int, float]]:
    """[(bytes, seconds)] of messages that are sent so."""
    with comm.use(**way):
        return comm.half_round_trips(group, sizes)


def speeds(group, spec: ModelSpec, tokens: int) -> tuple[float, float, float]:
    """This rank's FLOP/s, bytes a second and seconds, while all are busy: of the three products, forward and backward,
    of `tokens` tokens with a matrix of the feed-forward block; of sums of what it puts out, written to new memory; and
    of a layer's pass in which next to nothing is computed."""
    x, w = torch.randn(tokens, spec.hidden), torch.randn(spec.ffn, spec.hidden)
    y, z = x @ w.T, torch.randn(tokens, spec.ffn)

    def products() -> None:
        torch.mm(x, w.T)
        torch.mm(y, w)
        torch.mm(y.T, x)

    tiny = _model(replace(spec, hidden=4 * spec.heads, head_dim=4, ffn=8, vocab=8))
    few = torch.zeros(1, 4, dtype=torch.long)
    return (6 * x.numel() * len(w) / _seconds(products), 3 * y.nbytes / _seconds(lambda: y + z),
            _seconds(lambda: tiny.loss(few, few).backward()) / (3 * spec.layers))


def _seconds(call: Callable[[], object]) -> float:
    """Of a call, on average over the window, in which all ranks call it."""
    call()
    dist.barrier()
    start, times = time.perf_counter(), 0
    while (passed := time.perf_counter() - start) < WINDOW:
        call()
        times += 1
    return passed / times


def _model(spec: ModelSpec) -> Transformer:
    with torch.device("meta"):
        empty = Transformer(spec)
    return initialise(empty, seed=0)


def _adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)
