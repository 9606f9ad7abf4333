"""Several replicas behind one door: which of them a request goes to, and when its cache moves from one to another.

The control plane. It plans every replica's steps with the replica's own scheduler, and follows every transfer through
its states; how long anything takes, and whether anything is computed at all, is the affair of a `World`: real workers
in real time, real workers on a virtual clock, or none (`simulate`). All three see the same decisions.

A request is begun and ended by one replica, or, where there are replicas for prompts alone, begun by one of those,
which makes its first token, and ended by another, which needs the cache for that (`handovers`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .batch import Batch
from .events import Arrived, Event, Instance, Lost, Moved, Router, Stepped, World
from .handovers import Flight, Handovers
from .request import Answer, Request

Watch = Callable[[Instance, Batch], None]


class Cluster:
    """Instances, and the requests that they answer.

    `apart(uncached tokens, request)` decides whether a prompt is computed by a prefill instance, if there are any:
    always, when left out. `layerwise` streams caches while prompts are computed, else they are sent afterwards.
    `watch(instance, batch)` is told each step before it is begun.
    """

    def __init__(self, world: World, instances: Sequence[Instance], router: Router,
                 apart: Callable[[int, Request], bool] = lambda uncached, request: True, layerwise: bool = True,
                 watch: Watch = lambda instance, batch: None):
        self.world, self.instances, self.router = world, list(instances), router
        self.apart, self.watch = apart, watch
        self.flights = dict[int, Flight]()
        self.handovers = Handovers(world, layerwise)
        self.left = 0  # requests that have no answer yet
        self._dying = dict[int, bool]()  # given up while a step computes them; whether to be begun anew

    def run(self, requests: Sequence[Request]) -> list[Answer]:
        """Answer all requests, whose arrivals count from now; their answers, in order. Raises RuntimeError once no
        instance is left, and ValueError where two requests have the same number."""
        if len({request.number for request in requests}) < len(requests):
            raise ValueError("two requests have the same number, by which they are known")
        self.world.begin()
        answers = [Answer(request) for request in requests]
        for answer in answers:
            self.world.arrive(answer)
        self.left = len(answers)
        while self.left or self.handovers.draining:
            event = self.world.next()
            if event is None:
                raise RuntimeError(f"nothing more happens, and {self.left} requests have no answer: a world has to "
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
            case Moved(transfer, "drained"):
                self.handovers.drained(transfer)
            case Moved(transfer, how) if transfer.state not in ("draining", "dropped"):
                flight = self.flights[transfer.number]
                if how == "acked":
                    self.handovers.acked(flight, transfer)
                else:
                    self._give_up(flight, again=True)
            case Lost(instance):
                self._lost(instance)
        self._go_on()

    def abort(self, number: int) -> bool:
        """Give a request up, whatever it is at; False where it is not under way. Its blocks are free as soon as nobody
        reads or writes them."""
        if number not in self.flights:
            return False
        self._give_up(self.flights[number], again=False)
        self._go_on()
        return True

    def _go_on(self) -> None:
        self.handovers.send_parked()
        for instance in self.instances:
            if instance.alive and instance.working is None and instance.scheduler.busy:
                self._start(instance)

    def _place(self, answer: Answer) -> None:
        """Choose who begins the request and who ends it; one that was begun before goes on where it ends."""
        request, part = answer.request, answer
        alive = [each for each in self.instances if each.alive]
        if not alive:
            raise RuntimeError(f"no instance is left to answer request {request.number}: all have ended")
        ends = [each for each in alive if each.role != "prefill"] or alive
        target = source = self.router.pick(_able(ends, request) or ends, request)
        if target.role == "decode" and not answer.tokens:
            first = Request(request.number, request.prompt, 1, request.arrival)
            begins = _able([each for each in alive if each.role == "prefill"], first)
            if begins and self.apart(len(request.prompt) - target.pool.known(request.prompt), request):
                source, part = self.router.pick(begins, request), Answer(first)
        answer.refused = target.scheduler.refusal(request)
        if answer.refused:
            self.left -= 1
            return
        source.scheduler.add(part.request, part)
        weights = {source: len(request.prompt)}
        weights[target] = weights.get(target, 0) + request.new_tokens - len(answer.tokens)
        self.flights[request.number] = Flight(request, answer, source, target, part, weights)

    def _start(self, instance: Instance) -> None:
        batch = instance.scheduler.step()
        if batch is None:
            return
        streams = []
        if instance.role == "prefill":
            for item in batch.items:
                flight = self.flights[item.number]
                if flight.moves and flight.request.new_tokens > 1 and (stream := self.handovers.chunk(flight, item)):
                    streams.append(stream)
        instance.working = batch
        self.watch(instance, batch)
        self.world.run(instance, batch, streams)

    def _stepped(self, instance: Instance, batch: Batch, tokens: dict[int, int]) -> None:
        if not instance.alive:
            return
        instance.working = None
        for number in [number for number in self._dying if any(item.number == number for item in batch.items)]:
            self._give_up(self.flights[number], self._dying.pop(number))
        for part in instance.scheduler.made(batch, tokens, self.world.now()):
            flight = self.flights[part.request.number]
            if part is flight.answer:
                self._complete(flight)
            else:
                self._begun(flight)

    def _begun(self, flight: Flight) -> None:
        """The prompt is computed, and the first token made, by one replica for another."""
        answer, request, part = flight.answer, flight.request, flight.part
        answer.tokens += part.tokens
        answer.times += part.times
        answer.cached += part.cached
        flight.leaves(flight.source)
        if request.new_tokens == 1 or answer.tokens[-1] == request.stop:
            self._complete(flight)
        else:
            self.handovers.computed(flight)

    def _complete(self, flight: Flight) -> None:
        del self.flights[flight.request.number]
        self.left -= 1
        for instance in (flight.source, flight.target):
            flight.leaves(instance)
        self.handovers.let_go(flight)

    def _give_up(self, flight: Flight, again: bool) -> None:
        """Take the request from where it is, and begin what is left of it `again` or not. While a step computes it,
        its blocks are written, and this has to wait."""
        number = flight.request.number
        if any(item.number == number for each in self.instances if each.working for item in each.working.items):
            self._dying[number] = again and self._dying.get(number, True)
            return
        for instance in (flight.source, flight.target):
            instance.scheduler.abort(number)
        self._complete(flight)
        if again:
            self.left += 1
            flight.answer.preempted += 1
            self._place(flight.answer)

    def _lost(self, instance: Instance) -> None:
        """What the instance was at is begun anew by those who are left."""
        instance.alive, instance.working = False, None
        for flight in [each for each in self.flights.values() if instance in (each.source, each.target)]:
            self._give_up(flight, self._dying.pop(flight.request.number, True))


def _able(instances: Sequence[Instance], request: Request) -> list[Instance]:
    """Those that could ever run the request to its end."""
    return [each for each in instances if not each.scheduler.refusal(request)]
