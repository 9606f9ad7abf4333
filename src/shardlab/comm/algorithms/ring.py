"""The ring: each rank sends to its right neighbour and takes from its left one, p − 1 times round.

    reduce-scatter of four pieces, as rank 0 sees it (it ends with the sum of piece 0):

    step 0   sends piece 3                 takes piece 2 from rank 3, adds its own
    step 1   sends that sum of piece 2     takes piece 1, the sum of two ranks, adds its own
    step 2   sends that sum of piece 1     takes piece 0, the sum of three ranks, adds its own: done

Everybody sends all the time, and nobody sends a byte that need not be sent: an all-reduce costs each rank
2 (p − 1)/p of its tensor, however many ranks there are, and 2 (p − 1) messages one after the other (Patarasuk & Yuan,
J. Parallel Distrib. Comput. 69(2), 2009).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..peers import Peers

Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # combines two tensors in one of them, and returns that


def reduce_scatter(
        pieces: list[torch.Tensor], combine: Combine, peers: Peers) -> torch.Tensor:
    """Piece r of every rank's `pieces`, combined, for rank r.

    `pieces` are p flat tensors, those of the same index equally long on all ranks; some
    may be empty. Those that are not rank r's then hold sums of some ranks.
    """
    p, r = peers.size, peers.rank
    # the first piece is as long as any
    free = [torch.empty_like(pieces[0]) for _ in range(min(2, p - 1))]
    for step in range(p - 1):
        given, mine = (r - 1 - step) % p, (r - 2 - step) % p
        taken = free[step % 2][: len(pieces[mine])]
        peers.exchange(pieces[given], (r + 1) % p, taken, (r - 1) % p)
        pieces[mine] = combine(pieces[mine], taken)
    return pieces[r]


def all_gather(pieces: list[torch.Tensor], peers: Peers) -> None:
    """Fill in every rank's `pieces` from the one that each has at its own index."""
    p, r = peers.size, peers.rank
    for step in range(p - 1):
        given, taken = (r - step) % p, (r - 1 - step) % p
        peers.exchange(pieces[given], (r + 1) % p, pieces[taken], (r - 1) % p)


def all_reduce(x: torch.Tensor, combine: Combine, peers: Peers) -> None:
    """Combine the flat tensor `x` over all ranks, in place.

    Once round to add up, once round to hand out.
    """
    pieces = list(x.tensor_split(peers.size))
    reduce_scatter(pieces, combine, peers)
    all_gather(pieces, peers)
