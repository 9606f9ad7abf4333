"""Without relays: everybody sends straight to whom it is meant for.

For an all-to-all nothing is better in bytes, since no two ranks want the same. For an all-reduce it is the naive way:
rank 0 takes everybody's tensor, adds, and sends everybody the sum, so that 2 (p − 1) whole tensors pass through one
rank while the others wait. It is here to be beaten.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..peers import Peers
from .ring import Combine


def all_reduce(x: torch.Tensor, combine: Combine, peers: Peers) -> None:
    """Combine the flat tensor `x` over all ranks, in place: all to rank 0, and back."""
    if peers.rank:
        peers.send(x, 0)
        peers.recv(x, 0)
        return
    got = torch.empty_like(x)
    for rank in range(1, peers.size):
        peers.recv(got, rank)
        combine(x, got)
    for rank in range(1, peers.size):
        peers.send(x, rank)


def gather(pieces: Sequence[torch.Tensor] | None, mine: torch.Tensor, peers: Peers, root: int) -> None:
    """Fill in the `pieces` of `root`, one flat tensor for each rank, from every rank's `mine`."""
    if pieces is None:
        peers.send(mine, root)
        return
    for rank, piece in enumerate(pieces):
        piece.copy_(mine) if rank == root else peers.recv(piece, rank)


def scatter(pieces: Sequence[torch.Tensor] | None, mine: torch.Tensor, peers: Peers, root: int) -> None:
    """Fill in every rank's `mine` from the `pieces` of `root`, one flat tensor for each rank."""
    if pieces is None:
        peers.recv(mine, root)
        return
    for rank, piece in enumerate(pieces):
        mine.copy_(piece) if rank == root else peers.send(piece, rank)


def all_to_all(given: Sequence[torch.Tensor], taken: Sequence[torch.Tensor], peers: Peers) -> None:
    """Rank r's `given[q]` becomes rank q's `taken[r]`; flat tensors, of different lengths as it may be.

    Pairwise exchange: in step s everybody sends to the rank s to the right and takes from the one s to the left, so
    that nobody is sent to by two at once.
    """
    p, r = peers.size, peers.rank
    taken[r].copy_(given[r])
    for step in range(1, p):
        to, source = (r + step) % p, (r - step) % p
        peers.exchange(given[to], to, taken[source], source)
