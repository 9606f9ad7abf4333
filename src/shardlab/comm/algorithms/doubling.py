"""Recursive doubling and halving: partners at distance 1, 2, 4 … so that log₂ p exchanges reach everybody.

    doubling, eight ranks: who exchanges with whom

    0─1 2─3 4─5 6─7     all have the sum of 2
    0─2 1─3 4─6 5─7     all have the sum of 4
    0─4 1─5 2─6 3─7     all have the sum of 8

Doubling sends everything each time: few messages, many bytes. Halving (Rabenseifner's algorithm) begins far away and
sends half, a quarter, an eighth …, then collects the sums on the way back: twice the messages, as few bytes as a ring.
Both in Thakur, Rabenseifner & Gropp, IJHPCA 19(1), 2005. Where p is no power of two, some ranks first hand their tensor
to a neighbour, and get the result from it in the end.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..peers import Peers
from .ring import Combine


def all_reduce(x: torch.Tensor, combine: Combine, peers: Peers) -> None:
    """Combine the flat tensor `x` over all ranks, in place, by recursive doubling."""
    def among(peers: Peers) -> None:
        got, distance = torch.empty_like(x), 1
        while distance < peers.size:
            partner = peers.rank ^ distance
            peers.exchange(x, partner, got, partner)
            combine(x, got)
            distance *= 2

    _folded(x, combine, peers, among)


def all_reduce_halving(x: torch.Tensor, combine: Combine, peers: Peers) -> None:
    """Combine the flat tensor `x` over all ranks, in place, by recursive halving and doubling."""
    def among(peers: Peers) -> None:
        q, rank = peers.size, peers.rank
        starts = [0]
        for piece in x.tensor_split(q):
            starts.append(starts[-1] + len(piece))

        def span(first: int, count: int) -> torch.Tensor:
            return x[starts[first] : starts[first + count]]

        got, distance = torch.empty_like(x), q // 2
        while distance:  # of the 2·distance pieces that are ours by now, keep one half and give the other away
            partner = rank ^ distance
            mine, theirs = span(rank & -distance, distance), span(partner & -distance, distance)
            peers.exchange(theirs, partner, got[: len(mine)], partner)
            combine(mine, got[: len(mine)])
            distance //= 2
        distance = 1
        while distance < q:
            partner = rank ^ distance
            peers.exchange(span(rank & -distance, distance), partner, span(partner & -distance, distance), partner)
            distance *= 2

    _folded(x, combine, peers, among)


def _folded(x: torch.Tensor, combine: Combine, peers: Peers, among: Callable[[Peers], None]) -> None:
    """Run `among` on the largest power of two of ranks, the others' tensors added to a neighbour's before."""
    power = 1 << (peers.size.bit_length() - 1)
    extra, r = peers.size - power, peers.rank
    stay = [*range(1, 2 * extra, 2), *range(2 * extra, peers.size)]
    if r < 2 * extra and r % 2 == 0:
        peers.send(x, r + 1)
        peers.recv(x, r + 1)
        return
    if r < 2 * extra:
        got = torch.empty_like(x)
        peers.recv(got, r - 1)
        combine(x, got)
    among(peers.only(stay))
    if r < 2 * extra:
        peers.send(x, r - 1)


def barrier(peers: Peers) -> None:
    """Wait for all: in round k tell the rank 2^k to the right, hear from the one 2^k to the left.

    Dissemination (Hensgen, Finkel & Manber 1988): after ⌈log₂ p⌉ rounds everybody has, through others, heard from all.
    """
    token, heard = torch.zeros(2, 1, dtype=torch.uint8, device=peers.device)
    distance = 1
    while distance < peers.size:
        peers.exchange(token, (peers.rank + distance) % peers.size, heard, (peers.rank - distance) % peers.size)
        distance *= 2
