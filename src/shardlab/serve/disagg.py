"""Replicas in processes of their own, each with ranks of its own: the world of a `Cluster` that serves.

    with Workers(build, pools(prefill=2, decode=2, blocks=256)) as world:
        answers = Cluster(world, world.instances(), RoundRobin()).run(requests)

The end of a replica is not the end of the others: what it was at is begun anew by those who are left. This process
knows no tensors. Caches go from rank to rank (`transport`), and it is told when they are there.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty
from typing import Any, Literal

from ..launch import RankExited
from ..model.transformer import Transformer
from ..specs import LinkSpec
from ..specs.check import number
from .batch import Batch
from .crews import Crews
from .events import Arrived, Event, Instance, Lost, Moved, Stepped, Stream
from .outbox import Spoil
from .replica import Replica
from .request import Answer
from .runner import Choose, likeliest
from .transfer import Transfer
from .transport import Order
from .worker import Post, run_command


@dataclass(eq=False)
class Moving:
    """A transfer as the workers know it. `acked` are the target's ranks that have all of theirs; it fails at
    `deadline`. Once cancelled, `waits` are the ranks, by replica and number, that may still read or write its blocks.
    """

    transfer: Transfer
    serial: int
    acked: set[int] = field(default_factory=set)
    deadline: float | None = None
    waits: set[tuple[str, int]] | None = None


class Workers:
    """Replicas that compute, in real time: a `World`. Ends them when it is closed, or its `with` is left.

    `build()` makes the plain model, in each rank: with the same weights everywhere. Caches travel over `link`, slowed
    to its α and β, each replica with one port, or as fast as the machine can; `wire="int8"` sends caches of other
    numbers as bytes with scales. What takes longer than `patience` seconds has failed: a transfer is done again; a
    replica that hangs in a step, or can't end a transfer, is ended. `timeout` is how long replicas live at most, in
    seconds, `threads` how many PyTorch has in each. `ledger` keeps all messages of all ranks, until they are closed.
    `spoil` sees each message before it is sent, and may damage it.

    Raises ValueError without replicas, on another `wire` or `patience`, and where replicas can't take each other's
    caches, RankError with the rank's traceback where one fails at its start, RuntimeError where they start too late.
    """

    def __init__(self, build: Callable[[], Transformer], replicas: Sequence[Replica], *, link: LinkSpec | None = None,
                 wire: Literal["int8"] | None = None, patience: float = 60.0, timeout: float = 3600.0,
                 threads: int = 1, choose: Choose = likeliest, ledger: bool = False, spoil: Spoil | None = None):
        if not replicas or wire not in (None, "int8"):
            raise ValueError(f"{len(replicas)} replicas and wire={wire!r}: give one or more, and \"int8\" or None")
        self.replicas, self.patience = {replica.name: replica for replica in replicas}, number("patience", patience)
        self._broken: Exception | None = None  # why no more is done here
        self._instances = dict[str, Instance]()
        self._running = dict[str, tuple[Instance, Batch, float]]()  # and until when
        self._moving = dict[int, Moving]()
        self._events = deque[Event]()
        self._serial = self._count = 0
        targets = [replica.name for replica in replicas if replica.role == "decode"]

        def post(name: str, sockets: dict[str, list[str]], clocks: str) -> Post:
            replica = self.replicas[name]
            return Post(name, build, replica.layout, replica.blocks, replica.block_size, replica.dtype, choose, sockets,
                        targets if replica.role == "prefill" else [], link, clocks, wire, spoil, ledger)

        self.crews = Crews(replicas, post, timeout, threads)
        self.instances()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def instances(self) -> list[Instance]:
        """The replicas for a new `Cluster`: their pools empty. Those that have ended are not among them.

        What an earlier cluster has left under way is given up, and waited for. Raises RuntimeError once they are closed
        or a rank has failed: make new ones.
        """
        self._check()
        self._due = list[tuple[float, int, Answer]]()
        for moving in [each for each in self._moving.values() if each.waits is None]:
            self.cancel(moving.transfer)
        self.begin()
        while self.next() is not None:
            pass
        self.bytes: dict[Transfer, int] = {}  # that came, of those that arrived
        self.failed: dict[Transfer, str] = {}  # and why, of those that did not
        self._instances = {name: replica.instance(self.crews.limits[name]) for name, replica in self.replicas.items()
                           if name not in self.crews.ended}
        return list(self._instances.values())

    def close(self) -> None:
        """End all replicas; returns when they are gone."""
        self._broken = self._broken or RuntimeError("these replicas are closed")
        self.crews.close()

    def _check(self) -> None:
        if self._broken is not None:
            raise RuntimeError(f"nothing more can be served here: {self._broken}") from self._broken

    # what a Cluster asks of a world

    def begin(self) -> None:
        self._began = time.monotonic()

    def now(self) -> float:
        return time.monotonic() - self._began

    def arrive(self, answer: Answer) -> None:
        self._count += 1
        heapq.heappush(self._due, (answer.request.arrival, self._count, answer))

    def run(self, instance: Instance, batch: Batch, streams: Sequence[Stream] = ()) -> None:
        self._running[instance.name] = instance, batch, time.monotonic() + self.patience
        self.crews.tell(instance.name, run_command(batch, [self._order(stream) for stream in streams]))

    def send(self, stream: Stream) -> None:
        self.crews.tell(stream.transfer.source.name, {"do": "send", "order": vars(self._order(stream))})

    def cancel(self, transfer: Transfer) -> None:
        moving, ends = self._known(transfer), (transfer.source.name, transfer.target.name)
        moving.waits = {(name, rank) for name in ends if name not in self.crews.ended
                        for rank in range(self.crews.size(name))}
        moving.deadline = time.monotonic() + self.patience
        for name in ends:
            self.crews.tell(name, {"do": "cancel", "serial": moving.serial, "source": ends[0], "target": ends[1]})
        self._drained(moving)

    def next(self) -> Event | None:
        while True:
            self._check()
            if self._events:
                return self._events.popleft()
            now = self.now()
            if self._due and self._due[0][0] <= now:
                return Arrived(heapq.heappop(self._due)[-1])
            self._look_at_deadlines()
            if self._events:
                continue
            if not (self._due or self._running or self._moving):
                return None
            ends = [each.deadline for each in self._moving.values() if each.deadline is not None]
            ends += [deadline for _, _, deadline in self._running.values()]
            until = [self._due[0][0] - now] if self._due else []
            until += [deadline - time.monotonic() for deadline in ends]
            with suppress(Empty):
                self._hear(*self.crews.hear(max(0.0, min(until)) if until else None))

    def _hear(self, name: str, rank: int, said: Any) -> None:
        if rank < 0:
            self._end(name, said)
            return
        if name in self.crews.ended:
            return
        match said["did"]:
            case "ran":
                instance, batch, _ = self._running.pop(name)
                self._events.append(Stepped(instance, batch, dict(said["tokens"])))
            case "broke":
                self._broken = RuntimeError(f"a thread of rank {rank} of {name} has failed:\n{said['why']}")
                raise self._broken
            case what if said["serial"] in self._moving:
                self._moved(self._moving[said["serial"]], what, name, rank, said)

    def _moved(self, moving: Moving, what: str, name: str, rank: int, said: dict[str, Any]) -> None:
        if what == "drained":
            if moving.waits is not None:
                moving.waits.discard((name, rank))
                self._drained(moving)
        elif moving.waits is None and what == "acked":
            moving.acked.add(rank)
            self.bytes[moving.transfer] = self.bytes.get(moving.transfer, 0) + said["nbytes"]
            if len(moving.acked) == self.crews.size(name):
                del self._moving[moving.serial]
                self._events.append(Moved(moving.transfer, "acked"))
        elif moving.waits is None and moving.deadline is not None:
            self._fail(moving, f"rank {rank} of {name}: {said['why']}")

    def _fail(self, moving: Moving, why: str) -> None:
        moving.deadline = None
        self.failed[moving.transfer] = why
        self._events.append(Moved(moving.transfer, "failed"))

    def _drained(self, moving: Moving) -> None:
        if not moving.waits:
            del self._moving[moving.serial]
            self._events.append(Moved(moving.transfer, "drained"))

    def _look_at_deadlines(self) -> None:
        now = time.monotonic()
        for name, (instance, batch, deadline) in list(self._running.items()):
            if deadline <= now:
                self.crews.kill(name)  # and hear of its end
                self._running[name] = instance, batch, now + self.patience
        for moving in list(self._moving.values()):
            if moving.deadline is None or moving.deadline > now:
                continue
            if moving.waits is None:
                self._fail(moving, f"not there after {self.patience:g} s")
            else:  # somebody hangs: the target, if it has not answered; the source may wait for it
                target = moving.transfer.target.name
                hangs = {name for name, _ in moving.waits}
                self.crews.kill(target if target in hangs else hangs.pop())
                moving.deadline = now + self.patience

    def _end(self, name: str, error: Exception | None) -> None:
        """A replica's ranks have ended."""
        self._running.pop(name, None)
        if error is None:
            return
        if not isinstance(error, RankExited):
            self._broken = error
            raise error
        self._events += [Lost(self._instances[name])] if name in self._instances else []
        for moving in list(self._moving.values()):
            if moving.waits is not None:
                moving.waits = {(each, rank) for each, rank in moving.waits if each != name}
                self._drained(moving)

    def _known(self, transfer: Transfer) -> Moving:
        for moving in self._moving.values():
            if moving.transfer is transfer:
                return moving
        self._serial += 1
        self._moving[self._serial] = Moving(transfer, self._serial)
        return self._moving[self._serial]

    def _order(self, stream: Stream) -> Order:
        moving = self._known(stream.transfer)
        moving.deadline = time.monotonic() + self.patience
        return Order.of(moving.serial, stream)
