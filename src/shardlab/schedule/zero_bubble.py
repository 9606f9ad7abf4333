"""Zero bubble: the gradients of the weights, for which nobody waits, are computed where a rank would stand idle."""

from __future__ import annotations

from .action import Action, F, I, W
from .limits import sized
from .transfers import with_transfers


def zero_bubble(ranks: int, microbatches: int) -> list[list[Action]]:
    """ZB-H1: 1F1B with backward in two halves, and no more activations than 1F1B has on its first rank (Qi et al.,
    arXiv:2401.10241, §2.2).

    Rank r, which has r stages before it, puts off its first r W's: they fill its end, while it waits for nobody, and
    let the gradients that others wait for go ahead.
    """
    sized("zero_bubble", ranks, microbatches)
    orders = []
    for rank in range(ranks):
        ahead, order = min(ranks - rank - 1, microbatches), []
        order += [F(rank, i) for i in range(ahead)]
        for i in range(microbatches):
            order += [F(rank, ahead + i)] if ahead + i < microbatches else []
            order += [I(rank, i)]
            order += [W(rank, i - rank)] if i >= rank else []
        orders.append(order + [W(rank, i) for i in range(max(0, microbatches - rank), microbatches)])
    return with_transfers(orders)
