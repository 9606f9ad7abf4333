"""Schedules that fill, run and drain once a step, one stage a rank: GPipe and 1F1B.

Both wait equally long. GPipe holds the activations of all micro-batches, 1F1B those of as many as there are stages
from here to the end.
"""

from __future__ import annotations

from .action import Action, B, F
from .limits import sized
from .transfers import with_transfers


def gpipe(ranks: int, microbatches: int) -> list[list[Action]]:
    """All forward passes, then all backward passes (Huang et al., arXiv:1811.06965,
    §2.3)."""
    sized("gpipe", ranks, microbatches)
    every = range(microbatches)
    return with_transfers([[*(F(r, i) for i in every), *(B(r, i) for i in every)]
                           for r in range(ranks)])


def one_f_one_b(ranks: int, microbatches: int) -> list[list[Action]]:
    """As many forward passes as there are stages behind this one, then forward and
    backward in turn, then the backward passes that are left (PipeDream-Flush:
    Narayanan et al., arXiv:2006.09503; arXiv:2104.04473, §2.2.1)."""
    sized("1f1b", ranks, microbatches)
    orders = []
    for rank in range(ranks):
        ahead = min(ranks - rank - 1, microbatches)
        order = [F(rank, i) for i in range(ahead)]
        for i in range(microbatches - ahead):
            order += [F(rank, ahead + i), B(rank, i)]
        order += [B(rank, i) for i in range(microbatches - ahead, microbatches)]
        orders.append(order)
    return with_transfers(orders)


def forward_only(ranks: int, microbatches: int, chunks: int = 1) -> list[list[Action]]:
    """Forward passes alone, for evaluation: rank r has stages r, r + ranks, …, and takes micro-batch by micro-batch
    through the first of them in rounds of as many as there are ranks."""
    sized("forward_only", ranks, microbatches, chunks)
    rounds = [range(first, min(first + ranks, microbatches)) for first in range(0, microbatches, ranks)]
    return with_transfers([[F(chunk * ranks + rank, i) for some in rounds for chunk in range(chunks) for i in some]
                           for rank in range(ranks)])
