"""How long a list of messages takes on a topology: its links, and who has to wait for a NIC.

The model is Hockney's (Parallel Computing 20(3), 1994): a message of b bytes costs α + b/β. Its bytes occupy the
sender's way out and the receiver's way in for b/β; α is spent under way and occupies nothing.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from ..specs import Topology
from .messages import Message


def seconds(rounds: Iterable[Iterable[Message]], topology: Topology, ranks: Sequence[int] | None = None) -> float:
    """Seconds until all of these rounds of messages are done; `ranks[i]` is the global rank of number i, or i itself.

    A rank enters its next round when what it sends in this one has left and what it is sent has arrived; for nothing
    else does it wait. Messages start when their sender is in their round and both ways are free, first come first
    served: a node's one NIC, or a rank's own, has one way out and one way in; inside a node each rank has a way out and
    a way in. Over a link that is None a message takes no time. Nor does anything but the links: adding up, copying.

    Raises ValueError on a rank that the topology hasn't got.
    """
    sent = [list(messages) for messages in rounds]
    where = _places(sent, topology, ranks)
    by_sender: defaultdict[tuple[int, int], list[Message]] = defaultdict(list)
    missing = Counter({(number, rank): 1 for number in range(len(sent)) for rank in where})  # that it is there itself
    for number, messages in enumerate(sent):
        for message in messages:
            by_sender[number, message.src].append(message)
            missing[number, message.dst] += 1
    links = _Links(topology, where)
    done: defaultdict[tuple[int, int], float] = defaultdict(float)
    entering = [(0.0, 0, rank) for rank in where]  # when, which round, who: a heap, the earliest first

    def told(number: int, rank: int, when: float) -> None:
        done[number, rank] = max(done[number, rank], when)
        missing[number, rank] -= 1
        if not missing[number, rank]:
            heapq.heappush(entering, (done[number, rank], number + 1, rank))

    now = 0.0
    while entering:
        now, number, rank = heapq.heappop(entering)
        if number < len(sent):
            left = now
            for message in by_sender[number, rank]:
                gone, arrived = links.carry(message, now)
                left = max(left, gone)
                told(number, message.dst, arrived)
            told(number, rank, left)
    return now


class _Links:
    """Until when each way is taken."""

    def __init__(self, topology: Topology, where: dict[int, int]):
        self._topology, self._where = topology, where
        self._free: defaultdict[tuple[str, str, int], float] = defaultdict(float)

    def carry(self, message: Message, now: float) -> tuple[float, float]:
        """When a message asked for `now` has left, and when it has arrived; takes both ways until it has left."""
        src, dst = self._where[message.src], self._where[message.dst]
        link = self._topology.link(src, dst)
        if link is None:
            return now, now
        out, into = ("out", *self._way(src, dst)), ("in", *self._way(dst, src))
        left = max(now, self._free[out], self._free[into]) + message.nbytes / link.per_direction
        self._free[out] = self._free[into] = left
        return left, left + (link.alpha or 0.0)

    def _way(self, rank: int, other: int) -> tuple[str, int]:
        """What `rank` goes through to `other`."""
        node = self._topology.node(rank)
        if node == self._topology.node(other):
            return "inside", rank
        return "network", node if self._topology.nic == "node" else rank


def _places(rounds: list[list[Message]], topology: Topology, ranks: Sequence[int] | None) -> dict[int, int]:
    """The global rank of each number."""
    numbers = range(topology.ranks) if ranks is None else range(len(ranks))
    where = dict(zip(numbers, numbers if ranks is None else ranks, strict=True))
    for rank in where.values():
        topology.node(rank)
    if len(set(where.values())) < len(where):
        raise ValueError(f"ranks = {list(where.values())} names a rank twice")
    for message in (message for messages in rounds for message in messages):
        if not {message.src, message.dst} <= where.keys():
            raise ValueError(f"a message from {message.src} to {message.dst}, and only {len(where)} ranks: take a "
                             "topology with more, or say with ranks= which these are")
    return where
