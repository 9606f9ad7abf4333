"""Interleaved 1F1B: several stages a rank, each smaller, so that filling and draining take less time."""

from __future__ import annotations

from .action import Action, B, F
from .limits import sized
from .transfers import with_transfers


def interleaved(ranks: int, microbatches: int, chunks: int = 2) -> list[list[Action]]:
    """1F1B with `chunks` stages on each rank, r, r + ranks, … on rank r (Narayanan et al., arXiv:2104.04473, §2.2.2).

    Micro-batches go in rounds of as many as there are ranks: a round through a rank's first stage, then through its
    second, and so on. Raises ValueError where `microbatches` is no multiple of `ranks`, naming the nearest that are.
    """
    sized("interleaved", ranks, microbatches, chunks)
    total, orders = microbatches * chunks, []
    for rank in range(ranks):
        def forward(k: int, rank: int = rank) -> Action:
            return F(k // ranks % chunks * ranks + rank, k // (ranks * chunks) * ranks + k % ranks)

        def backward(k: int, rank: int = rank) -> Action:
            return B((chunks - 1 - k // ranks % chunks) * ranks + rank, k // (ranks * chunks) * ranks + k % ranks)

        # one chunk: as 1F1B. With more, the first backward comes only after a round through all chunks
        ahead = ranks - rank - 1 if chunks == 1 else 2 * (ranks - rank - 1) + (chunks - 1) * ranks
        ahead = min(ahead, total)
        order = [forward(k) for k in range(ahead)]
        for k in range(total - ahead):
            order += [forward(ahead + k), backward(k)]
        orders.append(order + [backward(k) for k in range(total - ahead, total)])
    return with_transfers(orders)
