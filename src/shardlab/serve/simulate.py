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
from .events import Arrived, Event, Instance, Moved, Stepped, Stream
from .request import Answer
from .scheduler import Batch
from .transfer import Transfer

StepTime = Callable[[Instance, list[tuple[int, int]]], float]  # of an instance and a batch's `work`, seconds


@dataclass(frozen=True)
class Wire:
    """What caches travel over: `link`, α seconds and β bytes a second from one instance to another, and how much a
    token is, `token_bytes` of all ranks and layers together, in `layers` messages."""

    link: LinkSpec
    token_bytes: float
    layers: int

    def seconds(self, tokens: int) -> float:
        """How long the bytes of so many tokens occupy the link."""
        return tokens * self.token_bytes / self.link.per_direction


class Simulated:
    """Time passes from event to event. A port of an instance serves one stream after the other, first come, first
    served, and one that waits for its layers keeps it meanwhile."""

    def __init__(self, step_time: StepTime, wire: Wire | None = None):
        self.step_time, self.wire = step_time, wire
        self._now, self._count = 0.0, 0
        self._events: list[tuple[float, int, Event]] = []
        self._free = defaultdict[tuple[str, str], float](float)  # when a port is free again, by instance and direction

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
        while self._events:
            self._now, _, event = heapq.heappop(self._events)
            if isinstance(event, Moved) and event.how == "acked" and event.transfer.state in ("draining", "dropped"):
                continue
            return event
        return None

    def _stream(self, stream: Stream, takes: float) -> None:
        """The layers of some tokens, computed one after the other within `takes` seconds from now."""
        if self.wire is None:
            raise ValueError("caches are to be moved, over what? Give the simulation a wire")
        transfer, layers = stream.transfer, self.wire.layers
        ports = (transfer.source.name, "out"), (transfer.target.name, "in")
        all_of_it = self.wire.seconds(stream.stop - stream.start)
        free = max(self._now, *(self._free[port] for port in ports))
        # Layers are ready at equal distances, and take equally long: whether the link is behind or ahead at the first
        # one, it is until the last.
        end = max(free + all_of_it, self._now + takes / layers + all_of_it, self._now + takes + all_of_it / layers)
        for port in ports:
            self._free[port] = end
        if stream.last:
            self._at(end + (self.wire.link.alpha or 0.0), Moved(transfer, "acked"))

    def _at(self, when: float, event: Event) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, event))
