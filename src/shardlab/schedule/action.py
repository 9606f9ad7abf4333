"""Actions: what a schedule is a list of, and what each of them needs.

The model is cut into stages, the batch into micro-batches. A schedule is a list for each rank of what it does, one
action after another; everything about it, such as which rank has which stage, can be read from the lists.

| kind   | what the rank does                                                          | and gives to stage |
|--------|-----------------------------------------------------------------------------|--------------------|
| F      | forward: from the stage's input to its output                               | stage + 1          |
| B      | backward: the gradients of the input and of the weights                     | stage − 1          |
| I      | of backward, the gradient of the input alone, for which the next stage waits | stage − 1          |
| W      | of backward, the gradients of the weights, for which nobody waits           |                    |
| send F | hand the output of the stage's F to the rank of the next stage              |                    |
| recv F | get what F of the stage (the one before) has put out                        |                    |
| send B | hand the gradient of the stage's input to the rank of the stage before      |                    |
| recv B | get the gradient that B or I of the stage (the next one) has put out        |                    |
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

COMPUTES = ("F", "B", "I", "W")
TRANSFERS = ("send F", "recv F", "send B", "recv B")
SENDS = {"F": "send F", "B": "send B", "I": "send B"}
RECEIVES = {"F": "recv F", "B": "recv B", "I": "recv B"}


class Action(NamedTuple):
    """One thing that a rank does for one micro-batch. `stage` is whose F or B it is, at both ends of a message too.

    An action that is `paired` runs at the same time as the one after it: a forward and a backward pass that fill each
    other's waits (DualPipe, arXiv:2412.19437, §3.2.1).
    """

    kind: str
    stage: int
    microbatch: int
    paired: bool = False

    def __str__(self) -> str:
        return f"{self.kind} of stage {self.stage}, micro-batch {self.microbatch}"


F, B, I, W = (partial(Action, kind) for kind in COMPUTES)  # noqa: E741  F(stage, microbatch)

Orders = Sequence[Sequence[Action]]  # for each rank, what it does, in order
What = tuple[str, int, int]  # what a pass gives: F, B or W, stage, micro-batch. I gives what B gives


def needs(action: Action, last: int) -> tuple[What, ...]:
    """What must have been given before, where `last` is the last stage."""
    kind, stage, microbatch, _ = action
    if kind == "F":
        return (("F", stage - 1, microbatch),) if stage > 0 else ()
    if kind == "W":
        return (("B", stage, microbatch),)
    own = "F", stage, microbatch
    return (own, ("B", stage + 1, microbatch)) if stage < last else (own,)


def gives(action: Action) -> What:
    """What is there once the action is done."""
    kind, stage, microbatch, _ = action
    return "B" if kind == "I" else kind, stage, microbatch


def size(orders: Orders) -> tuple[int, int]:
    """(stages, micro-batches) that the lists are about. Raises ValueError where they compute nothing."""
    stages = {stage for order in orders for kind, stage, _, _ in order if kind == "F"}
    microbatches = {microbatch for order in orders for kind, _, microbatch, _ in order if kind == "F"}
    if not stages:
        raise ValueError("a schedule needs forward passes, and this one has none")
    return 1 + max(stages), 1 + max(microbatches)


def placement(orders: Orders) -> list[list[int]]:
    """The stages of each rank, in order."""
    return [sorted({action.stage for action in order if action.kind == "F"}) for order in orders]


def computing(orders: Orders) -> list[list[Action]]:
    """The lists without their messages."""
    return [[action for action in order if action.kind in COMPUTES] for order in orders]
