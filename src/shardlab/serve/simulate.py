"""A world in which nothing is computed: steps take as long as `step_time` says, messages as long as the link.

A discrete-event simulation. What is decided is decided by the same schedulers, pools and router as in a real run; only
the time is modelled. Every token is 0.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..specs import LinkSpec
from .batch import Batch
from .events import Arrived, Event, Instance, Moved, Stepped, Stream
from .request import Answer
from .transfer import Transfer

StepTime = Callable[[Instance, list[tuple[int, int]]], float]  # of an instance and a batch's `work`, seconds


@dataclass(frozen=True)
class Wire:
    """What caches travel over: `link`, α seconds a message and β bytes a second from one instance to another, and how
    much a token is, `token_bytes` of all ranks and `layers` together."""

    link: LinkSpec
    token_bytes: float
    layers: int

    def seconds(self, tokens: int, messages: int = 1) -> float:
        """How long one of so many messages, alike, with the caches of so many tokens occupies the link."""
        return (self.link.alpha or 0.0) + tokens * self.token_bytes / self.link.per_direction / messages


class Simulated:
    """Time passes from event to event. A port of an instance serves one stream after the other, first come, first
    served, and one that waits for its layers keeps it meanwhile."""

    def __init__(self, step_time: StepTime, wire: Wire | None = None):
        self.step_time, self.wire = step_time, wire
        self._now, self._count = 0.0, 0
        self._events: list[tuple[float, int, Event]] = []
        self._free = defaultdict[tuple[str, str], float](float)  # when a port is free again, by instance and direction

    def begin(self) -> None:
        """The time is 0 again; of what is still under way as much is left as was before."""
        self._events = [(when - self._now, count, event) for when, count, event in self._events]
        self._free = defaultdict(float, {port: when - self._now for port, when in self._free.items()})
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def arrive(self, answer: Answer) -> None:
        self._at(answer.request.arrival, Arrived(answer))

    def run(self, instance: Instance, batch: Batch, streams: Sequence[Stream] = ()) -> None:
        takes = self.step_time(instance, batch.work)
        self._at(self._now + takes, Stepped(instance, batch, {item.number: 0 for item in batch.items if item.samples}))
        for stream in streams:
            self._stream(stream, takes)

    def send(self, stream: Stream) -> None:
        self._stream(stream, 0.0)

    def cancel(self, transfer: Transfer) -> None:
        self._at(self._now, Moved(transfer, "drained"))

    def next(self) -> Event | None:
        if not self._events:
            return None
        self._now, _, event = heapq.heappop(self._events)
        return event

    def _stream(self, stream: Stream, takes: float) -> None:
        """Some tokens, whose layers are computed one after the other within `takes` seconds from now; in one message,
        if they are already."""
        if self.wire is None:
            raise ValueError("caches are to be moved, over what? Give the simulation a wire")
        transfer, messages = stream.transfer, self.wire.layers if takes else 1
        ports = (transfer.source.name, "out"), (transfer.target.name, "in")
        one = self.wire.seconds(stream.stop - stream.start, messages)
        free = max(self._now, *(self._free[port] for port in ports))
        # Layers are ready at equal distances, and take equally long: whether the link is behind or ahead at the first
        # one, it is until the last.
        end = max(free + messages * one, self._now + takes / messages + messages * one, self._now + takes + one)
        for port in ports:
            self._free[port] = end
        if stream.last:
            self._at(end, Moved(transfer, "acked"))

    def _at(self, when: float, event: Event) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, event))
