"""Requests under way, and the hand-over of a cache from the replica that computed a prompt to the one that goes on."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

from .batch import Item
from .events import Instance, Stream, World
from .request import Answer, Request
from .transfer import Transfer


@dataclass(slots=True, eq=False)
class Flight:
    """A request under way: where it is begun, where it ends (the same, once nothing is to move), and the cache between.

    `part` is what the source makes of the answer: all of it, or the first token. `weights` are what the instances have
    outstanding because of it. `held` are the source's blocks with a hold of the flight's own, until a transfer takes it
    over.
    """

    request: Request
    answer: Answer
    source: Instance
    target: Instance
    part: Answer
    weights: dict[Instance, int]
    transfer: Transfer | None = None
    held: list[int] | None = None

    def __post_init__(self) -> None:
        for instance, weight in self.weights.items():
            instance.outstanding += weight

    @property
    def moves(self) -> bool:
        return self.source is not self.target

    def leaves(self, instance: Instance) -> None:
        """The instance has nothing more to do for it."""
        instance.outstanding -= self.weights.pop(instance, 0)


class Handovers:
    """All transfers of a cluster, and the computed prompts that wait for room where they are to go on.

    `layerwise` streams caches while prompts are computed, if the target has room by then; what has not been begun by
    the prompt's end is sent in bulk. Room is given in the order in which prompts were computed, and to nobody while a
    request waits at the target that gave up its cache there.
    """

    def __init__(self, world: World, layerwise: bool):
        self.world, self.layerwise = world, layerwise
        self.arrived = list[Transfer]()
        self.draining = 0
        self._parked = defaultdict[Instance, deque[Flight]](deque)  # by target
        self._serial = 0

    def chunk(self, flight: Flight, item: Item) -> Stream | None:
        """What is to be sent of a part of the prompt that is computed next."""
        if flight.held is None and flight.transfer is None:  # the first chunk; its table is the whole prompt's
            flight.held = list(item.blocks)
            flight.source.pool.hold(flight.held)
            if self.layerwise and not self._parked[flight.target]:
                self._reserve(flight)
        stop = item.start + len(item.tokens)
        if (transfer := flight.transfer) is None or transfer.sent >= stop:
            return None
        if transfer.state == "reserved":
            transfer.to("streaming")
        stream = Stream(transfer, transfer.sent, stop, item.samples)
        transfer.sent = stop
        return stream

    def computed(self, flight: Flight) -> None:
        """The prompt is computed, and its first token made, which does not end the answer."""
        transfer = flight.transfer
        if transfer is None:
            self._parked[flight.target].append(flight)
        elif transfer.state == "streaming":
            transfer.to("sealed")
        elif transfer.state == "acked":
            self._adopt(flight, transfer)

    def send_parked(self) -> None:
        """Send what waited for room, as far as there is some."""
        for flights in self._parked.values():
            while flights and (transfer := self._reserve(flights[0])):
                flights.popleft()
                transfer.to("streaming")
                self.world.send(Stream(transfer, transfer.sent, transfer.tokens, True))
                transfer.sent = transfer.tokens
                transfer.to("sealed")

    def acked(self, flight: Flight, transfer: Transfer) -> None:
        """The target has all of it; it may go on once the first token is known."""
        if transfer.state == "streaming":  # the source's own word is still on its way
            transfer.to("sealed")
        transfer.to("acked")
        if flight.answer.tokens:
            self._adopt(flight, transfer)

    def let_go(self, flight: Flight) -> None:
        """Free the blocks that the flight or its transfer holds, or see to it that they will be."""
        if flight in self._parked[flight.target]:
            self._parked[flight.target].remove(flight)
        if (transfer := flight.transfer) is None:
            if flight.held is not None:
                flight.source.pool.release(flight.held)
        elif transfer.state == "acked":
            self._drop(transfer)
        else:
            transfer.to("draining")
            self.draining += 1
            self.world.cancel(transfer)
        flight.transfer = flight.held = None

    def drained(self, transfer: Transfer) -> None:
        """Nobody reads or writes the blocks of a transfer any more that was given up."""
        self.draining -= 1
        self._drop(transfer)

    def _drop(self, transfer: Transfer) -> None:
        transfer.to("dropped")
        transfer.source.pool.release(transfer.taken)
        transfer.target.pool.release(transfer.given)

    def _reserve(self, flight: Flight) -> Transfer | None:
        """Blocks at the target for the whole prompt, those that it knows among them, if there are enough."""
        target, prompt, held = flight.target, flight.request.prompt, flight.held
        room = None if target.scheduler.short else target.scheduler.reserve(prompt)
        if room is None or held is None:
            return None
        blocks, parent, shared = room
        self._serial += 1
        flight.transfer = Transfer(self._serial, flight.request.number, flight.source, target, len(prompt),
                                   shared * target.pool.block_size, held, blocks, parent)
        flight.held = None
        return flight.transfer

    def _adopt(self, flight: Flight, transfer: Transfer) -> None:
        target = flight.target
        transfer.begun, transfer.adopted = flight.answer.times[-1], self.world.now()
        target.scheduler.adopt(flight.answer, transfer.given, transfer.parent, transfer.had // target.pool.block_size)
        transfer.source.pool.release(transfer.taken)
        transfer.to("freed")
        self.arrived.append(transfer)
        flight.source, flight.transfer = target, None
