"""PyTorch's own ways, on the same plain model: what its documentation recommends for each."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from .model import MICROBATCHES, SPEC, Step, adamw, batch, model


def ddp(group, zero: bool = False) -> Step:
    """Its gradients are views of the buckets, which saves a copy; `zero`: with ZeroRedundancyOptimizer."""
    cut = DistributedDataParallel(model(), gradient_as_bucket_view=True)
    if not zero:
        return _data(cut, adamw(cut.parameters()), group)
    return _data(cut, ZeroRedundancyOptimizer(cut.parameters(), torch.optim.AdamW, lr=1e-3), group)


def fsdp(group, reshard: bool) -> Step:
    """`reshard`: whether weights are freed between forward and backward, as ZeRO-3 does, or kept, as ZeRO-2 does."""
    cut, mesh = model(), dist.init_device_mesh("cpu", (group.size(),))
    for layer in cut.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(cut, mesh=mesh, reshard_after_forward=reshard)
    return _data(cut, adamw(cut.parameters()), group)


def dtensor(group, sequence: bool) -> Step:
    """Logits stay cut, by `loss_parallel`."""
    cut = model()
    parallelize_module(cut, dist.init_device_mesh("cpu", (group.size(),)), _plan(sequence))
    optimizer = adamw(cut.parameters())
    tokens, labels = batch()

    def step() -> torch.Tensor:
        with loss_parallel():
            loss = F.cross_entropy(cut(tokens).flatten(0, 1), labels.flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().full_tensor() / group.size()

    return step


class Part(torch.nn.Module):
    """One of `count` stages of the plain model: as many layers as each other one."""

    def __init__(self, number: int, count: int):
        super().__init__()
        plain, each = model(), SPEC.layers // count
        self.through, self.layers = plain.through, plain.layers[number * each : (number + 1) * each]
        self.embed_tokens = plain.embed_tokens if number == 0 else None
        self.norm, self.lm_head = (plain.norm, plain.lm_head) if number == count - 1 else (None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = x.shape[:2]
        x = x if self.embed_tokens is None else self.embed_tokens(x)
        x = self.through(self.layers, x, shape)
        return x if self.lm_head is None else self.lm_head(self.norm(x))


def piped(group, schedule, chunks: int = 1) -> Step:
    """Stages in the order of ranks, `chunks` on each."""
    p, rank, tokens_labels = group.size(), group.rank(), batch()
    numbers = [rank + chunk * p for chunk in range(chunks)]
    parts = [Part(number, p * chunks) for number in numbers]
    stages = [PipelineStage(part, number, p * chunks, torch.device("cpu"))
              for part, number in zip(parts, numbers, strict=True)]

    def cost(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    run = schedule(stages if chunks > 1 else stages[0], MICROBATCHES, loss_fn=cost)
    optimizer = adamw([parameter for part in parts for parameter in part.parameters()])
    tokens, labels = tokens_labels
    first, last = rank == 0, rank == p - 1

    def step() -> torch.Tensor:
        losses: list[torch.Tensor] = []
        run.step(*([tokens] if first else []), **({"target": labels, "losses": losses} if last else {}))
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().detach() if last else torch.zeros(())

    return step


def _data(cut, optimizer, group) -> Step:
    tokens, labels = batch(group.rank(), group.size())

    def step() -> torch.Tensor:
        loss = F.cross_entropy(cut(tokens).flatten(0, 1), labels.flatten())
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
        "pipelining interleaved": partial(piped, schedule=ScheduleInterleaved1F1B, chunks=2)}
