"""The verbs through memory that all ranks share, on flat tensors: each gives its result and the bytes written there."""

from __future__ import annotations

import torch

from . import shm
from .made import COMBINE

Result = tuple[torch.Tensor, int]


def all_reduce(x: torch.Tensor, ranks: tuple[int, ...], text: str, op: str) -> Result:
    return x, shm.here().all_reduce(x, COMBINE[op], ranks, text)


def reduce_scatter(x: torch.Tensor, ranks: tuple[int, ...], text: str, op: str,
                   place: torch.Tensor | None = None) -> Result:
    out = x.new_empty(len(x) // len(ranks)) if place is None else place
    return out, shm.here().reduce_scatter(out, x, COMBINE[op], ranks, text)


def all_gather(x: torch.Tensor, ranks: tuple[int, ...], text: str, place: torch.Tensor | None = None) -> Result:
    out = x.new_empty(len(x) * len(ranks)) if place is None else place
    return out, shm.here().all_gather(out, x, ranks, text)


def broadcast(x: torch.Tensor, ranks: tuple[int, ...], text: str, root: int) -> Result:
    return x, shm.here().broadcast(x, ranks[root], ranks, text)


def barrier(x: None, ranks: tuple[int, ...], text: str) -> tuple[None, int]:
    return None, shm.here().barrier(ranks, text)
