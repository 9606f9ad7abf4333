"""Real workers on a virtual clock: what is decided is what a simulation decides, and what is made is real."""

from __future__ import annotations

from collections.abc import Sequence

from .batch import Batch
from .disagg import Workers
from .events import Event, Instance, Lost, Moved, Stepped, Stream
from .simulate import Simulated, StepTime, Wire
from .transfer import Transfer


class Rehearsal(Simulated):
    """Workers that compute, on the clock of a simulation: steps take as long as `step_time` says and transfers as long
    as the wire, whatever they really take. An event is handed out when it is due, and has really happened. Tokens are
    the real ones.
    """

    def __init__(self, workers: Workers, step_time: StepTime, wire: Wire | None = None):
        super().__init__(step_time, wire)
        self.workers = workers
        self._happened = list[Event]()

    def run(self, instance: Instance, batch: Batch, streams: Sequence[Stream] = ()) -> None:
        super().run(instance, batch, streams)
        self.workers.run(instance, batch, streams)

    def send(self, stream: Stream) -> None:
        super().send(stream)
        self.workers.send(stream)

    def cancel(self, transfer: Transfer) -> None:
        super().cancel(transfer)
        self.workers.cancel(transfer)

    def next(self) -> Event | None:
        event = super().next()
        if isinstance(event, Stepped) or (isinstance(event, Moved) and not (
                event.how == "acked" and event.transfer.state in ("draining", "dropped"))):
            return self._really(event)
        return event

    def _really(self, event: Event) -> Event:
        """The real event of the simulated one. RuntimeError where something else has become of it."""
        while True:
            for each in self._happened:
                if same(event, each):
                    self._happened.remove(each)
                    return each
            real = self.workers.next()
            if real is None or isinstance(real, Lost) or (isinstance(real, Moved) and real.how == "failed"):
                raise RuntimeError(f"a rehearsal expects {event}, and what happened is {real}")
            self._happened.append(real)


def same(simulated: Event, real: Event) -> bool:
    if isinstance(simulated, Stepped):
        return isinstance(real, Stepped) and real.batch is simulated.batch
    return isinstance(simulated, Moved) and isinstance(real, Moved) and (
        (simulated.transfer, simulated.how) == (real.transfer, real.how))

