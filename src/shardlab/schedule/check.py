"""The proof of a schedule: nothing is missing, nothing comes too early, and the ranks never wait for each other.

Messages are taken in their strictest sense: a send ends when its receiver takes it, and both ranks do nothing else
meanwhile. NCCL's do wait so for large tensors; a library that buffers them is kinder, and proves nothing.
"""

from __future__ import annotations

from collections import Counter

from .action import COMPUTES, RECEIVES, SENDS, TRANSFERS, Action, Orders, computing, gives, needs, size

Done = set[tuple[str, int, int]]


def check(orders: Orders) -> None:
    """Raise ValueError, naming rank, place and action, unless the lists are a schedule that comes to its end.

    Complete: each stage does each micro-batch's F once and, unless no stage does any, its B once, or its I and its W,
    on the rank of its F. In order: every action finds what it needs, from its own rank or received before. No deadlock:
    done strictly in order, with sends that wait for their receivers, all lists come to their ends.
    """
    _complete(orders)
    _run(orders)


def peak_live(orders: Orders) -> list[int]:
    """The most (stage, micro-batch)es of which each rank holds activations at a time: from F to the end of backward."""
    peaks = []
    for order in computing(orders):
        live = peak = 0
        for action in order:
            live += {"F": 1, "I": 0}.get(action.kind, -1)
            peak = max(peak, live)
        peaks.append(peak)
    return peaks


def _complete(orders: Orders) -> None:
    for rank, order in enumerate(orders):
        for place, action in enumerate(order):
            if action.kind not in COMPUTES + TRANSFERS or action.stage < 0 or action.microbatch < 0:
                raise ValueError(f"rank {rank} has no action {action} (its {place}th): kinds are "
                                 f"{', '.join(COMPUTES + TRANSFERS)}, stages and micro-batches count from 0")
            if action.paired and (place + 1 == len(order) or {action.kind, order[place + 1].kind} != {"F", "B"}):
                raise ValueError(f"rank {rank} runs {action} paired with the next: a pair is an F and a B")
    stages, microbatches = size(orders)
    ranks: dict[tuple[int, int], set[int]] = {}
    counts: Counter[tuple[str, int, int]] = Counter()
    for rank, order in enumerate(computing(orders)):
        for kind, stage, microbatch, _ in order:
            counts[kind, stage, microbatch] += 1
            ranks.setdefault((stage, microbatch), set()).add(rank)
    trains = any(kind != "F" for kind, _, _ in counts)
    right = [(1, 1, 0, 0), (1, 0, 1, 1)] if trains else [(1, 0, 0, 0)]
    for stage in range(stages):
        for microbatch in range(microbatches):
            found = tuple(counts[kind, stage, microbatch] for kind in COMPUTES)
            if found not in right:
                told = ", ".join(f"{n} {kind}" for n, kind in zip(found, COMPUTES, strict=True))
                raise ValueError(f"stage {stage} does {told} for micro-batch {microbatch}: it takes one F"
                                 + (", and one B or one I and one W" if trains else ""))
            if len(ranks[stage, microbatch]) > 1:
                raise ValueError(f"stage {stage} does micro-batch {microbatch} on ranks "
                                 f"{sorted(ranks[stage, microbatch])}: backward must run where forward did")
    for kind, stage, _ in counts:
        if stage >= stages:
            raise ValueError(f"stage {stage} does {kind} and no F: the stages with an F are 0 to {stages - 1}")


def _run(orders: Orders) -> None:
    """Do the lists, strictly, as far as they go."""
    stages, _ = size(orders)
    home = {(action.stage, action.microbatch): rank for rank, order in enumerate(orders) for action in order
            if action.kind == "F"}
    at, have = [0] * len(orders), [set() for _ in orders]  # type: tuple[list[int], list[Done]]
    meets: dict[tuple[str, int, int], int] = {}  # the rank that stands at the other end of a message
    runnable = list(range(len(orders)))[::-1]
    while runnable:
        rank = runnable.pop()
        order, mine = orders[rank], have[rank]
        while at[rank] < len(order):
            action = order[at[rank]]
            if action.kind in COMPUTES:
                _pass(rank, action, mine, stages)
            else:
                what = action.kind[-1], action.stage, action.microbatch
                _message(rank, action, mine, home)
                other = meets.pop(what, None)
                if other is None:
                    meets[what] = rank
                    break  # it stands there until the other end comes
                if orders[other][at[other]].kind == action.kind:
                    raise ValueError(f"ranks {other} and {rank} both do {action}: one sends, one receives")
                for each in (rank, other):
                    if orders[each][at[each]].kind.startswith("recv"):
                        have[each].add(what)
                at[other] += 1
                runnable.append(other)
            at[rank] += 1
    if stuck := [f"rank {rank} at {orders[rank][place]}" for rank, place in enumerate(at) if place < len(orders[rank])]:
        raise ValueError("deadlock where a send waits for its receiver: " + ", ".join(stuck)
                         + ". Both ends of each message must stand in one order: see schedule.with_transfers")


def _pass(rank: int, action: Action, mine: Done, stages: int) -> None:
    for need in needs(action, stages - 1):
        if need not in mine:
            kind, stage, microbatch = need
            raise ValueError(f"rank {rank} does {action} before it has {kind} of stage {stage}, micro-batch "
                             f"{microbatch}: do or receive that first")
    mine.add(gives(action))


def _message(rank: int, action: Action, mine: Done, home: dict[tuple[int, int], int]) -> None:
    """Raise ValueError unless a message comes from the rank that makes what it brings and goes to one that needs it."""
    what = kind, stage, microbatch = action.kind[-1], action.stage, action.microbatch
    if action.kind.startswith("send"):
        if what not in mine or home[stage, microbatch] != rank:
            raise ValueError(f"rank {rank} does {action} before it has made it")
    elif what in mine:
        raise ValueError(f"rank {rank} does {action}, which it has already")
    elif home.get((stage + 1 if kind == "F" else stage - 1, microbatch)) != rank:
        raise ValueError(f"rank {rank} does {action}, which no pass of its needs")


assert set(SENDS.values()) | set(RECEIVES.values()) == set(TRANSFERS)
