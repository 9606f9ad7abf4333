"""The messages that a schedule needs, put into its lists so that no two ranks can wait for each other.

Two ranks that both send first, to each other, each wait for a receiver that never comes. It is enough that there is
one order of all events in which both ends of every message stand at the same place, and that each list is what one rank
sees of it: then the earliest message that is not through always finds both its ranks. The order taken here is that of
time, every pass as long as `clock.units` says: a message stands where the pass that makes it ends, on both ranks.
"""

from __future__ import annotations

from .action import RECEIVES, SENDS, Action, Orders
from .check import complete
from .clock import clock


def with_transfers(orders: Orders) -> list[list[Action]]:
    """The lists of computing actions with a send and a receive wherever one rank needs
    what another has made. Messages that are there already are put anew.

    Raises ValueError as `clock` does, or as `check` does where an action is missing, or
    there twice.
    """
    try:
        spans = clock(orders)
    except (ValueError, AttributeError):
        complete(orders)  # says more, if that is the reason
        raise
    rank_of = {(action.stage, action.microbatch): rank
               for rank, mine in enumerate(spans)
               for action, *_ in mine if action.kind == "F"}
    events = []  # (when, a message before the next pass, by which pass of which rank)
    for rank, mine in enumerate(spans):
        for i, (action, start, end) in enumerate(mine):
            events.append((start, 1, rank, i))
            if action.kind != "W":
                events.append((end, 0, rank, i))
    lists: list[list[Action]] = [[] for _ in spans]
    for _, begins, rank, i in sorted(events):
        kind, stage, microbatch, _ = action = spans[rank][i].action
        if begins:
            lists[rank].append(action)
        else:
            following = stage + 1 if kind == "F" else stage - 1
            peer = rank_of.get((following, microbatch), rank)
            if peer != rank:
                lists[rank].append(Action(SENDS[kind], stage, microbatch))
                lists[peer].append(Action(RECEIVES[kind], stage, microbatch))
    return lists
