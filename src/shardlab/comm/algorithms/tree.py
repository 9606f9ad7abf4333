"""The binomial tree: sums go up to the root, the result comes down, log₂ p messages each way.

    eight ranks, root 0            step 0         step 1         step 2

    0 ◂── 1                        1 → 0          2 → 0          4 → 0
    0 ◂── 2 ◂── 3                  3 → 2          6 → 4
    0 ◂── 4 ◂── 5                  5 → 4
          4 ◂── 6 ◂── 7            7 → 6

Few messages one after the other, as with doubling; but each carries the whole tensor, and most ranks wait most of the
time. (NCCL's trees cut the tensor into slices that follow each other up and down; this one does not.)
"""

from __future__ import annotations

import torch

from ..peers import Peers
from .ring import Combine


def reduce(x: torch.Tensor, combine: Combine, peers: Peers, root: int = 0) -> None:
    """Combine the flat tensor `x` of all ranks into that of `root`. The others' then hold parts of the result."""
    p, distance = peers.size, 1
    v = (peers.rank - root) % p  # so that the root is number 0
    got = torch.empty_like(x)
    while distance < p:
        if v % (2 * distance):
            peers.send(x, (v - distance + root) % p)
            return
        if v + distance < p:
            peers.recv(got, (v + distance + root) % p)
            combine(x, got)
        distance *= 2


def broadcast(x: torch.Tensor, peers: Peers, root: int = 0) -> None:
    """Overwrite the flat tensor `x` of all ranks with that of `root`: the same tree, downwards."""
    p = peers.size
    v = (peers.rank - root) % p
    distance = 1 << max(0, (p - 1).bit_length() - 1)
    while distance:
        if v % (2 * distance) == distance:
            peers.recv(x, (v - distance + root) % p)
        elif v % (2 * distance) == 0 and v + distance < p:
            peers.send(x, (v + distance + root) % p)
        distance //= 2


def all_reduce(x: torch.Tensor, combine: Combine, peers: Peers) -> None:
    """Combine the flat tensor `x` over all ranks, in place: up the tree and down again."""
    reduce(x, combine, peers)
    broadcast(x, peers)
