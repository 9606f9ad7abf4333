"""The verbs made of messages, on flat tensors: the algorithm that is asked for, called with what it works on."""

from __future__ import annotations

from functools import cache

import torch

from .algorithms import TABLE
from .algorithms.ring import Combine
from .groups import name_of
from .peers import Peers

COMBINE: dict[str, Combine] = {"sum": torch.Tensor.add_,
                               "max": lambda x, other: torch.maximum(x, other, out=x),
                               "min": lambda x, other: torch.minimum(x, other, out=x),
                               "product": torch.Tensor.mul_}  # each in place of the first


def refuse(verb: str, x: torch.Tensor, op: str) -> None:
    """Raise ValueError where torch can't combine such tensors; found out halfway, the ranks would be out of step."""
    if not _combines(op, x.dtype, x.device.type):
        raise ValueError(f"torch has no {op} of {name_of(x.dtype)}, so no {verb}({op}) of it: "
                         "convert the tensor")


@cache
def _combines(op: str, dtype: torch.dtype, device: str) -> bool:
    try:
        COMBINE[op](*torch.zeros(2, 1, dtype=dtype, device=device))
    except RuntimeError:  # NotImplementedError is one
        return False
    return True


def all_reduce(x: torch.Tensor, peers: Peers, name: str, op: str) -> torch.Tensor:
    TABLE["all_reduce"][name](x, COMBINE[op], peers)
    return x


def reduce_scatter(x: torch.Tensor, peers: Peers, name: str, op: str,
                   place: torch.Tensor | None = None) -> torch.Tensor:
    def combine(own: torch.Tensor, taken: torch.Tensor) -> torch.Tensor:
        return COMBINE[op](taken, own)  # in place of what has come, since `x` is the caller's

    mine = TABLE["reduce_scatter"][name](list(x.tensor_split(peers.size)), combine, peers)
    if place is not None:
        return place.copy_(mine)
    return mine.clone() if peers.size == 1 else mine


def reduce(x: torch.Tensor, peers: Peers, name: str, op: str, root: int) -> torch.Tensor:
    TABLE["reduce"][name](x, COMBINE[op], peers, root)
    return x


def all_gather(x: torch.Tensor, peers: Peers, name: str, place: torch.Tensor | None = None) -> torch.Tensor:
    out = x.new_empty(peers.size, len(x)) if place is None else place.view(peers.size, len(x))
    out[peers.rank] = x
    TABLE["all_gather"][name](list(out), peers)
    return out.view(-1)


def all_to_all(x: torch.Tensor, peers: Peers, name: str, given: list[int], taken: list[int]) -> torch.Tensor:
    out = x.new_empty(sum(taken))
    TABLE["all_to_all"][name](x.split(given), out.split(taken), peers)
    return out


def broadcast(x: torch.Tensor, peers: Peers, name: str, root: int) -> torch.Tensor:
    TABLE["broadcast"][name](x, peers, root)
    return x


def gather(x: torch.Tensor, peers: Peers, name: str, root: int) -> torch.Tensor:
    out = x.new_empty(peers.size if peers.rank == root else 0, len(x))
    TABLE["gather"][name](list(out) if peers.rank == root else None, x, peers, root)
    return out.view(-1)


def scatter(x: torch.Tensor, peers: Peers, name: str, root: int, whole: torch.Tensor | None) -> torch.Tensor:
    TABLE["scatter"][name](list(whole.tensor_split(peers.size)) if whole is not None else None, x, peers, root)
    return x


def barrier(x: None, peers: Peers, name: str) -> None:
    TABLE["barrier"][name](peers)
