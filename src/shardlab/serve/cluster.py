"""Several replicas behind one door: which of them a request goes to, and when its cache moves from one to another.

The control plane. It plans every replica's steps with the replica's own scheduler, and follows every transfer through
its states; how long anything takes, and whether anything is computed at all, is the affair of a `World`: real workers
in real time, real workers on a virtual clock, or none (`simulate`). All three see the same decisions.

A request is begun and ended by one replica, or, where there are replicas for prompts alone, begun by one of those, which
makes its first token, and ended by another, which needs the cache for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .events import Arrived, Event, Instance, Lost, Moved, Router, Stepped, Stream, World
from .request import Answer, Request
from .scheduler import Batch
from .transfer import Transfer


@dataclass(slots=True, eq=False)
class Flight:
    """A request under way: where it is begun, where it ends (the same, once nothing is to move), and the cache between.

    `part` is what the source makes of the answer: all of it, or the first token. `held` are the source's blocks with
    a hold of the flight's own, until a transfer takes it over.
    """

    request: Request
    answer: Answer
    source: Instance
    target: Instance
    part: Answer
    weights: dict[Instance, int]
    transfer: Transfer | None = None
    held: list[int] | None = None

    @property
    def moves(self) -> bool:
        return self.source is not self.target

    def leaves(self, instance: Instance) -> None:
        instance.outstanding -= self.weights.pop(instance, 0)


class Cluster:
    """Instances, and the requests that they answer.

    `apart(uncached tokens, request)` decides whether a prompt is computed by a prefill instance, if there are any:
    always, when left out. `layerwise` streams caches while prompts are computed, else they are sent afterwards.
    """

    def __init__(self, world: World, instances: Sequence[Instance], router: Router,
                 apart: Callable[[int, Request], bool] = lambda uncached, request: True, layerwise: bool = True):
        self.world, self.instances, self.router = world, list(instances), router
        self.apart, self.layerwise = apart, layerwise
        self.flights = dict[int, Flight]()
        self.plans = list[tuple[str, tuple]]()  # every step, in the order of their beginnings
        self.transfers = list[Transfer]()  # those that arrived
        self._parked = list[Flight]()  # prompts that are computed, with no room at the target yet
        self._draining, self._serial, self._left = 0, 0, 0
        self._dying = dict[int, bool]()  # given up while a step computes them; whether to be begun anew

    def run(self, requests: Sequence[Request]) -> list[Answer]:
        """Answer all requests; their answers, in order. Raises RuntimeError once no instance is left, and ValueError
        where two requests have the same number."""
        if len({request.number for request in requests}) < len(requests):
            raise ValueError("two requests have the same number, by which they are known")
        answers = [Answer(request) for request in requests]
        for answer in answers:
            self.world.arrive(answer)
        self._left = len(answers)
        while self._left or self._draining:
            event = self.world.next()
            if event is None:
                raise RuntimeError(f"nothing more happens, and {self._left} requests have no answer: a world has to "
                                   "bring back what it is given")
            self.take(event)
        return answers

    def take(self, event: Event) -> None:
        """Do what follows from an event, and let every instance that can work begin its next step."""
        match event:
            case Arrived(answer):
                self._place(answer)
            case Stepped(instance, batch, tokens):
                self._stepped(instance, batch, tokens)
            case Moved(transfer, how):
                self._moved(transfer, how)
            case Lost(instance):
                self._lost(instance)
        for flight in [flight for flight in self._parked if self._reserve(flight)]:
            self._parked.remove(flight)
            self._send(flight)
        for instance in self.instances:
            if instance.alive and instance.working is None and instance.scheduler.busy:
                self._start(instance)

    def abort(self, number: int) -> bool:
        """Give a request up, whatever it is at; False where it is not under way. Its blocks are free as soon as nobody
        reads or writes them."""
        if number in self.flights:
            self._give_up(self.flights[number], again=False)
            return True
        return False

    def _place(self, answer: Answer) -> None:
        """Choose who begins the request and who ends it; one that was begun before goes on where it ends."""
        request = answer.request
        alive = [each for each in self.instances if each.alive]
        if not alive:
            raise RuntimeError(f"no instance is left to answer request {request.number}: all have ended")
        target = source = self.router.pick([each for each in alive if each.role != "prefill"] or alive, request)
        begins = [each for each in alive if each.role == "prefill"]
        if begins and target.role == "decode" and not answer.tokens and self.apart(
                len(request.prompt) - target.pool.known(request.prompt), request):
            source = self.router.pick(begins, request)
        part, moves = answer, source is not target
        answer.refused = target.scheduler.refusal(request)
        if not answer.refused and moves:
            part = source.scheduler.add(Request(request.number, request.prompt, 1, request.arrival))
            answer.refused = part.refused
        elif not answer.refused:
            target.scheduler.add(request, answer)
        if answer.refused:
            self._left -= 1
            return
        weights = {source: len(request.prompt)}
        weights[target] = weights.get(target, 0) + request.new_tokens
        self.flights[request.number] = Flight(request, answer, source, target, part, weights)
        for instance, weight in weights.items():
            instance.outstanding += weight

    def _start(self, instance: Instance) -> None:
        batch = instance.scheduler.step()
        if batch is None:
            return
        streams = list[Stream]()
        for item in batch.items:
            flight = self.flights[item.number]
            if not flight.moves or flight.request.new_tokens == 1:
                continue
            if flight.held is None:  # the first chunk; its table is the whole prompt's
                flight.held = list(item.blocks)
                instance.pool.hold(flight.held)
                if self.layerwise and self._reserve(flight):
                    flight.transfer.to("streaming")  # type: ignore[union-attr]
            if (transfer := flight.transfer) is not None and transfer.sent < (stop := item.start + len(item.tokens)):
                streams.append(Stream(transfer, transfer.sent, stop, item.samples))
                transfer.sent = stop
        instance.working = batch
        self.plans.append((instance.name, batch.plan))
        self.world.run(instance, batch, streams)

    def _reserve(self, flight: Flight) -> bool:
        """Blocks at the target for the whole prompt, those that it knows among them; whether there were enough."""
        pool, prompt, held = flight.target.pool, flight.request.prompt, flight.held
        shared, parent = pool.share(prompt)
        needed = pool.needed(len(prompt)) - len(shared)
        if needed > pool.free or held is None:
            pool.release(shared)
            return False
        self._serial += 1
        flight.transfer = Transfer(self._serial, flight.request.number, flight.source, flight.target, len(prompt),
                                   len(shared) * pool.block_size, held, shared + pool.take(needed), parent)
        return True

    def _send(self, flight: Flight) -> None:
        assert flight.transfer is not None
        flight.transfer.to("streaming")
        self.world.send(Stream(flight.transfer, flight.transfer.had, flight.transfer.tokens, True))
        flight.transfer.to("sealed")

    def _stepped(self, instance: Instance, batch: Batch, tokens: dict[int, int]) -> None:
        instance.working = None
        for number in [item.number for item in batch.items if item.number in self._dying]:
            self._give_up(self.flights[number], self._dying.pop(number))
        for part in instance.scheduler.made(batch, tokens, self.world.now()):
            flight = self.flights[part.request.number]
            if part is flight.answer:
                self._complete(flight)
            else:
                self._begun(flight, part)

    def _begun(self, flight: Flight, part: Answer) -> None:
        """The prompt is computed, and the first token made."""
        answer, request, transfer = flight.answer, flight.request, flight.transfer
        answer.tokens += part.tokens
        answer.times += part.times
        answer.cached += part.cached
        flight.leaves(flight.source)
        if transfer is not None:
            transfer.begun = self.world.now()
            if transfer.state == "streaming":
                transfer.to("sealed")
        if request.new_tokens == 1 or answer.tokens[-1] == request.stop:
            self._complete(flight)
        elif transfer is None and self._reserve(flight):
            flight.transfer.begun = self.world.now()  # type: ignore[union-attr]
            self._send(flight)
        elif transfer is None:
            self._parked.append(flight)
        elif transfer.state == "acked":
            self._adopt(flight)

    def _moved(self, transfer: Transfer, how: str) -> None:
        if how == "drained":
            self._free(transfer)
            self._draining -= 1
        elif transfer.state != "draining":
            flight = self.flights[transfer.number]
            if how == "failed":
                self._give_up(flight, again=True)
                return
            if transfer.state == "streaming":  # the source's own word is still on its way
                transfer.to("sealed")
            transfer.to("acked")
            if flight.answer.tokens:
                self._adopt(flight)

    def _adopt(self, flight: Flight) -> None:
        transfer, target = flight.transfer, flight.target
        assert transfer is not None
        transfer.adopted = self.world.now()
        target.scheduler.adopt(flight.answer, transfer.given, transfer.parent, transfer.had // target.pool.block_size)
        transfer.source.pool.release(transfer.taken)
        transfer.to("freed")
        self.transfers.append(transfer)
        flight.source, flight.transfer, flight.held = target, None, None

    def _complete(self, flight: Flight) -> None:
        del self.flights[flight.request.number]
        self._left -= 1
        for instance in (flight.source, flight.target):
            flight.leaves(instance)
        self._let_go(flight)

    def _give_up(self, flight: Flight, again: bool) -> None:
        """Take the request from where it is, and begin what is left of it `again` or not. While a step computes it,
        its blocks are written, and this has to wait."""
        number = flight.request.number
        if any(item.number == number for each in self.instances if each.working for item in each.working.items):
            self._dying[number] = again and self._dying.get(number, True)
            return
        for instance in (flight.source, flight.target):
            instance.scheduler.abort(number)
        if flight in self._parked:
            self._parked.remove(flight)
        self._complete(flight)
        if again:
            self._left += 1
            flight.answer.preempted += 1
            self._place(flight.answer)

    def _let_go(self, flight: Flight) -> None:
        """Free the blocks that the flight or its transfer holds; those on the way, when nobody touches them any more."""
        transfer = flight.transfer
        if transfer is None:
            if flight.held is not None:
                flight.source.pool.release(flight.held)
        elif transfer.state == "acked":
            self._free(transfer)
        else:
            transfer.to("draining")
            self._draining += 1
            self.world.cancel(transfer)

    def _free(self, transfer: Transfer) -> None:
        transfer.source.pool.release(transfer.taken)
        transfer.target.pool.release(transfer.given)
        transfer.state = "dropped"

    def _lost(self, instance: Instance) -> None:
        """What the instance was at is begun anew by those who are left."""
        instance.alive, instance.working = False, None
        for flight in [each for each in self.flights.values() if instance in (each.source, each.target)]:
            self._give_up(flight, self._dying.pop(flight.request.number, True))
