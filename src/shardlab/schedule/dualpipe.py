"""DualPipe and DualPipeV: two streams of micro-batches cross, and the forward of one fills the waits of the other.

A rank has two stages. In DualPipe (DeepSeek-V3, arXiv:2412.19437, §3.2.1) two copies of the model lie opposite each
other: half of the micro-batches enter at the first rank, half at the last. Folded at its middle, with two different
stages a rank, it is DualPipeV, which needs one copy (its authors' "cut in half").

Both do the same eight steps. "here" is the stream that the rank comes to first, "there" the one that comes back.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from .action import Action, B, F, I, W
from .limits import sized
from .transfers import with_transfers

Stream = tuple[int, int]  # the stage that this rank does for it, its first micro-batch


def dualpipe_v(ranks: int, microbatches: int) -> list[list[Action]]:
    """DualPipeV: rank r has stages r and 2 · ranks − 1 − r. Raises ValueError below two micro-batches a rank."""
    sized("dualpipe_v", ranks, microbatches)
    return with_transfers([_steps(ranks, microbatches, rank, (rank, 0), (2 * ranks - 1 - rank, 0))
                           for rank in range(ranks)])


def dualpipe(ranks: int, microbatches: int) -> list[list[Action]]:
    """DualPipe: stage s is on ranks s and ranks − 1 − s, the second half of the micro-batches on the latter.

    Raises ValueError where ranks or micro-batches are odd, and below two micro-batches a rank.
    """
    sized("dualpipe", ranks, microbatches)
    half, orders = microbatches // 2, []
    for rank in range(ranks):
        down, up = (rank, 0), (ranks - 1 - rank, half)
        first, depth = ((down, up), rank) if rank < ranks // 2 else ((up, down), ranks - 1 - rank)
        orders.append(_steps(ranks // 2, half, depth, *first))
    return with_transfers(orders)


def _steps(depths: int, microbatches: int, depth: int, here: Stream, there: Stream) -> list[Action]:
    """The list of the rank that `depth` others come before on the way to the turn, of `depths` in all."""
    order: list[Action] = []
    late: list[Action] = []  # weight gradients that are put off
    after = depths - 1 - depth

    def stream(of: Stream) -> tuple[Callable[[], Action], Callable[..., None]]:
        stage, first = of
        forwards, backwards = count(first), count(first)

        def backward(split: bool = False) -> None:
            i = next(backwards)
            order.append(I(stage, i) if split else B(stage, i))
            late.extend([W(stage, i)] if split else [])

        return lambda: F(stage, next(forwards)), backward

    (forward_here, backward_here), (forward_there, backward_there) = stream(here), stream(there)

    def pair(forward: Callable[[], Action], backward: Callable[..., None]) -> None:
        order.append(forward()._replace(paired=True))
        backward()

    order += [forward_here() for _ in range(2 * after)]
    for _ in range(depth + 1):
        order += [forward_here(), forward_there()]
    for _ in range(after):  # backward comes back: its weight gradients fill the wait for the next forward
        backward_there(split=True)
        order += [late.pop(0), forward_there()]
    for i in range(microbatches - 2 * depths + depth + 1):
        if i == 0 and after == 0:  # at the turn the backward pass is of what comes just before it
            order.append(forward_here())
            backward_there()
        else:
            pair(forward_here, backward_there)
        pair(forward_there, backward_here)
    for _ in range(after):
        backward_there()
        pair(forward_there, backward_here)
    for i in range(depth + 1):  # the second half of these is split, and so are all after them
        split = [2 * i + side >= depth + 1 for side in (0, 1)]
        backward_there(split[0])
        backward_here(split[1])
    for _ in range(after):
        order.append(late.pop(0))
        backward_here(split=True)
    return order + late
