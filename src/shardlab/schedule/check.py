"""The proof of a schedule: nothing is missing, nothing comes too early, and the ranks never wait for each other.

Messages are taken in their strictest sense: a send ends when its receiver takes it, and both ranks do nothing else
meanwhile. NCCL's do wait so for large tensors; a library that buffers them is kinder, and proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .action import COMPUTES, TRANSFERS, Action, Orders, What, computing, gives, needs, size

KINDS = COMPUTES + TRANSFERS
HOLDS = {"F": 1, "B": -1, "I": 0, "W": -1}  # of how many more micro-batches a rank has activations after it
Home = dict[tuple[int, int], int]  # which rank does the passes of a stage for a micro-batch


def check(orders: Orders) -> None:
    """Raise ValueError, naming rank and action, unless the lists are a schedule that comes to its end.

    Complete: each stage does each micro-batch's F once and, unless no stage does any, its B once, or its I and its W,
    all on one rank. In order: every action finds what it needs, from its own rank or received before. No deadlock: done
    strictly in order, with sends that wait for their receivers, all lists come to their ends. Raises TypeError on what
    is no Action.
    """
    _run(orders, complete(orders))


def peak_live(orders: Orders) -> list[int]:
    """The most (stage, micro-batch)es of which each rank holds activations at a time: from F to the end of backward.
    Without any backward none are held."""
    todo = computing(orders)
    if all(action.kind == "F" for order in todo for action in order):
        return [0] * len(todo)
    peaks = []
    for order in todo:
        live = peak = 0
        for action in order:
            live += HOLDS[action.kind]
            peak = max(peak, live)
        peaks.append(peak)
    return peaks


def _actions(rank: int, order: Sequence[Action]) -> None:
    """Raise unless the list has actions alone, and pairs are pairs."""
    first = None  # of a pair
    for action in order:
        if not isinstance(action, Action):
            raise TypeError(f"rank {rank} has {action!r}, which is no Action such as F(stage, microbatch)")
        kind, stage, microbatch, paired = action
        if kind not in KINDS or not (isinstance(stage, int) and isinstance(microbatch, int) and stage >= 0
                                     and microbatch >= 0):
            raise ValueError(f"rank {rank} has no action {action}: kinds are {', '.join(KINDS)}, stages and "
                             "micro-batches count from 0")
        if first and (paired or {first.kind, kind} != {"F", "B"} or first[1:3] == (stage, microbatch)):
            raise ValueError(f"rank {rank} runs {first} paired with {action}: a pair is an F and a B, not of the same "
                             "stage and micro-batch")
        first = action if paired else None
    if first:
        raise ValueError(f"rank {rank} runs {first} paired with the next, and has none")


def complete(orders: Orders) -> Home:
    """Raise, as `check` does, unless each stage does each micro-batch, on one rank; returns on which."""
    for rank, order in enumerate(orders):
        _actions(rank, order)
    home: Home = {}
    passes: dict[tuple[int, int], str] = {}  # the kinds of passes
    for rank, order in enumerate(computing(orders)):
        for action in order:
            kind, stage, microbatch, _ = action
            what = stage, microbatch
            passes[what] = passes.get(what, "") + kind
            if home.setdefault(what, rank) != rank:
                raise ValueError(f"rank {rank} does {action}, and rank {home[what]} has done passes of that stage and "
                                 "micro-batch: they all run where forward did")
    trains = any(kinds.strip("F") for kinds in passes.values())
    right, takes = (("BF", "FIW"), "one F, and one B or one I and one W") if trains else (("F",), "one F")
    for (stage, microbatch), kinds in passes.items():
        if "".join(sorted(kinds)) not in right:
            raise ValueError(f"rank {home[stage, microbatch]} does {', '.join(kinds)} of stage {stage}, micro-batch "
                             f"{microbatch}: it takes {takes}")
    stages, microbatches = size(orders)
    for stage in range(stages):
        for microbatch in range(microbatches):
            if (stage, microbatch) not in passes:
                ranks = sorted({rank for what, rank in home.items() if what[0] == stage})
                raise ValueError(f"no rank does F of stage {stage}, micro-batch {microbatch}: the stage is on "
                                 f"{'ranks ' + str(ranks) if ranks else 'none'}")
    return home


def _run(orders: Orders, home: Home) -> None:
    """Do the lists, strictly, as far as they go. Raise unless that is to their ends."""
    last = max(stage for stage, _ in home)
    have: list[set[What]] = [set() for _ in orders]
    stands: dict[What, tuple[int, Action]] = {}  # who waits at one end of a message, with which action

    def work(rank: int) -> Iterator[Action]:
        """Do the rank's passes, and yield its messages."""
        mine = have[rank]
        for action in orders[rank]:
            if action.kind in COMPUTES:
                for need in needs(action, last):
                    if need not in mine:
                        raise ValueError(f"rank {rank} does {action} before it has {Action(*need)}: do or receive that "
                                         "first")
                mine.add(gives(action))
            else:
                _message(rank, action, mine, home)
                yield action

    runnable = list(range(len(orders)))
    works = [work(rank) for rank in runnable]
    while runnable:
        rank = runnable.pop()
        for action in works[rank]:
            what = action.kind[-1], action.stage, action.microbatch
            if what not in stands:
                stands[what] = rank, action
                break  # it stands there until the other end comes
            other, end = stands.pop(what)
            if end.kind == action.kind:
                raise ValueError(f"ranks {other} and {rank} both do {action}: one sends, one receives")
            have[rank if action.kind.startswith("recv") else other].add(what)
            runnable.append(other)
    if stands:
        stuck = ", ".join(f"rank {rank} at {action}" for rank, action in sorted(stands.values()))
        raise ValueError(f"deadlock where a send waits for its receiver: {stuck}. Both ends of each message must stand "
                         "in one order: see schedule.with_transfers")


def _message(rank: int, action: Action, mine: set[What], home: Home) -> None:
    """Raise unless a message comes from the rank that makes what it brings and goes to one that needs it."""
    kind, stage, microbatch = what = action.kind[-1], action.stage, action.microbatch
    if action.kind.startswith("send"):
        if what not in mine or home[stage, microbatch] != rank:
            raise ValueError(f"rank {rank} does {action} before it has made it")
    elif what in mine:
        raise ValueError(f"rank {rank} does {action}, which it has already")
    elif home.get((stage + 1 if kind == "F" else stage - 1, microbatch)) != rank:
        raise ValueError(f"rank {rank} does {action}, which no pass of its needs")
