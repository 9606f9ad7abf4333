"""PyTorch's own ways, on the same plain model: what its documentation recommends for each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from .model import MICROBATCHES, SEQ, SPEC, Step, adamw, batch, model


def ddp(group, zero: bool = False) -> Step:
    """Its gradients are views of the buckets, which saves a copy; `zero`: with ZeroRedundancyOptimizer."""
    cut = DistributedDataParallel(model(), gradient_as_bucket_view=True)
    if not zero:
        return _data(cut, adamw(cut.parameters()), group)
    return _data(cut, ZeroRedundancyOptimizer(cut.parameters(), torch.optim.AdamW, lr=1e-3), group)


def fsdp(group, reshard: bool) -> Step:
    """`reshard`: whether weights are freed between forward and backward, as ZeRO-3 does, or kept, as ZeRO-2 does."""
    cut = _fsdp(model(), dist.init_device_mesh("cpu", (group.size(),)), reshard)
    return _data(cut, adamw(cut.parameters()), group)


def dtensor(group, sequence: bool) -> Step:
    """Logits stay cut, by `loss_parallel`."""
    cut = parallelize_module(model(), dist.init_device_mesh("cpu", (group.size(),)), _plan(sequence))
    return _tensor(cut, *batch(), group.size())


def fsdp_dtensor(group, sequence: bool) -> Step:
    """FSDP2 over pairs of ranks far apart, each layer cut over neighbours before that."""
    mesh = dist.init_device_mesh("cpu", (group.size() // 2, 2), mesh_dim_names=("dp", "tp"))
    cut = _fsdp(parallelize_module(model(), mesh["tp"], _plan(sequence)), mesh["dp"], reshard=True)
    return _tensor(cut, *batch(mesh["dp"].get_local_rank(), mesh["dp"].size()), group.size())


class Part(torch.nn.Module):
    """One of `count` stages of the plain model: as many layers as each other one."""

    def __init__(self, number: int, count: int):
        super().__init__()
        plain, each = model(), SPEC.layers // count
        self.through, self.layers = plain.through, plain.layers[number * each : (number + 1) * each]
        self.embed_tokens = plain.embed_tokens if number == 0 else None
        self.norm, self.lm_head = (plain.norm, plain.lm_head) if number == count - 1 else (None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = x.shape[0], SEQ  # of the tokens: between stages of cut layers x may be a part of the sequence
        x = x if self.embed_tokens is None else self.embed_tokens(x)
        x = self.through(self.layers, x, shape)
        return x if self.lm_head is None else self.lm_head(self.norm(x))


def piped(group, schedule, chunks: int = 1) -> Step:
    """Stages in the order of ranks, `chunks` on each."""
    p, rank = group.size(), group.rank()
    numbers = [rank + chunk * p for chunk in range(chunks)]
    parts = [Part(number, p * chunks) for number in numbers]
    stages = [PipelineStage(part, number, p * chunks, torch.device("cpu"))
              for part, number in zip(parts, numbers, strict=True)]
    run = schedule(stages if chunks > 1 else stages[0], MICROBATCHES, loss_fn=_mean)
    step = _pipelined(run, adamw([parameter for part in parts for parameter in part.parameters()]))
    return lambda: step(rank == 0, rank == p - 1)


def dtensor_piped(group, sequence: bool) -> Step:
    """1F1B over pairs of ranks far apart, the layers of each stage cut over neighbours; logits too."""
    mesh = dist.init_device_mesh("cpu", (2, group.size() // 2), mesh_dim_names=("pp", "tp"))
    number, tp = mesh["pp"].get_local_rank(), mesh["tp"].size()
    part = Part(number, 2)
    names = dict(part.named_modules())
    parallelize_module(part, mesh["tp"], {name: how for name, how in _plan(sequence).items() if name in names})
    stage = PipelineStage(part, number, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    run = _pipelined(Schedule1F1B(stage, 8, loss_fn=_mean), adamw(part.parameters()))

    def step() -> torch.Tensor:
        with loss_parallel():
            return run(number == 0, number == 1) / tp

    return step


def _fsdp(cut: torch.nn.Module, mesh, reshard: bool) -> torch.nn.Module:
    for layer in cut.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(cut, mesh=mesh, reshard_after_forward=reshard)
    return cut


def _mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _pipelined(run, optimizer) -> Callable[[bool, bool], torch.Tensor]:
    """A step of the schedule `run`, on a rank that has the first stage, the last one, or neither."""
    tokens, labels = batch()

    def step(first: bool, last: bool) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        run.step(*([tokens] if first else []), **({"target": labels, "losses": losses} if last else {}))
        optimizer.step()
        optimizer.zero_grad()
        if not last:
            return torch.zeros(())
        loss = torch.stack(losses).mean().detach()
        return loss.full_tensor() if isinstance(loss, DTensor) else loss

    return step


def _tensor(cut, tokens: torch.Tensor, labels: torch.Tensor, ranks: int) -> Step:
    """Of logits that are cut, on so many ranks that have a loss."""
    optimizer = adamw(cut.parameters())

    def step() -> torch.Tensor:
        with loss_parallel():
            loss = _mean(cut(tokens), labels)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().full_tensor() / ranks

    return step


def _data(cut, optimizer, group) -> Step:
    tokens, labels = batch(group.rank(), group.size())

    def step() -> torch.Tensor:
        loss = _mean(cut(tokens), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach() / group.size()  # a mean of the rank's tokens

    return step


def _plan(sequence: bool) -> dict:
    stream = Shard(1) if sequence else Replicate()
    plan = {"embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
            "lm_head": ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False)}
    into = {"self_attn": ("q_proj", "k_proj", "v_proj"), "mlp": ("gate_proj", "up_proj")}
    out = {"self_attn": "o_proj", "mlp": "down_proj"}
    for i in range(SPEC.layers):
        for part in into:
            at = f"layers.{i}.{part}"
            plan |= {f"{at}.{name}": ColwiseParallel() for name in into[part]}
            plan[f"{at}.{out[part]}"] = RowwiseParallel(output_layouts=stream)
            if sequence:
                others = (None,) * (4 if part == "self_attn" else 0)  # cos, sin, cache, run
                plan[at] = PrepareModuleInput(input_layouts=(Shard(1), *others),
                                              desired_input_layouts=(Replicate(), *others))
        if sequence:
            plan |= {f"layers.{i}.{norm}": SequenceParallel()
                     for norm in ("input_layernorm", "post_attention_layernorm")}
    return plan | ({"norm": SequenceParallel()} if sequence else {})


WAYS = {"DDP": ddp, "ZeroRedundancyOptimizer": partial(ddp, zero=True),
        "FSDP2, kept": partial(fsdp, reshard=False), "FSDP2": partial(fsdp, reshard=True),
        "DTensor TP": partial(dtensor, sequence=False), "DTensor TP+SP": partial(dtensor, sequence=True),
        "pipelining GPipe": partial(piped, schedule=ScheduleGPipe),
        "pipelining 1F1B": partial(piped, schedule=Schedule1F1B),
        "pipelining interleaved": partial(piped, schedule=ScheduleInterleaved1F1B, chunks=2),
        **{f"FSDP2 · TP{'+SP' * sequence}": partial(fsdp_dtensor, sequence=sequence) for sequence in (False, True)},
        **{f"TP{'+SP' * sequence} · 1F1B": partial(dtensor_piped, sequence=sequence) for sequence in (False, True)}}
