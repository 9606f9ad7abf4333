"""The messages that a schedule needs, put into its lists so that no two ranks can wait for each other.

Two ranks that both send first, to each other, each wait for a receiver that never comes. It is enough that there is
one order of all events in which both ends of every message stand at the same place, and that each list is what one rank
sees of it: then the earliest message that is not through always finds both its ranks. The order taken here is that of
time, every pass as long as `clock.units` says: a message stands where the pass that makes it ends, on both ranks.
"""

from __future__ import annotations

from .action import RECEIVES, SENDS, Action, Orders, size
from .clock import clock


def with_transfers(orders: Orders) -> list[list[Action]]:
    """The lists of computing actions with a send and a receive wherever one rank needs
    what another has made.

    Raises ValueError as `clock` does.
    """
    stages, _ = size(orders)
    spans = clock(orders)
    rank_of = {(span.action.stage, span.action.microbatch): rank
               for rank, mine in enumerate(spans) for span in mine if span.action.kind == "F"}
    trains = any(span.action.kind in "BI" for mine in spans for span in mine)
    # (when, a message before the next pass, in what order at that time), what
    events: list[list[tuple[float, int, tuple[int, ...], Action]]] = [
        [(span.start, 1, (i,), span.action) for i, span in enumerate(mine)] for mine in spans]
    for rank, mine in enumerate(spans):
        for i, (action, _, end) in enumerate(mine):
            kind, stage, microbatch, _ = action
            following = stage + 1 if kind == "F" else stage - 1
            if kind == "W" or not 0 <= following < stages or not (trains or kind == "F"):
                continue
            peer = rank_of.get((following, microbatch), rank)
            if peer != rank:
                at = end, 0, (rank, i)
                events[rank].append((*at, Action(SENDS[kind], stage, microbatch)))
                events[peer].append((*at, Action(RECEIVES[kind], stage, microbatch)))
    return [[action for *_, action in sorted(mine, key=lambda event: event[:3])]
            for mine in events]
