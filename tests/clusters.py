"""A world in which trouble happens, and caches hold something: what a token is depends on all before it, by sums.

`Troubled` keeps, for each block of each instance, what was written there, as late as a real world could: a step's when
it ends, a transfer's when it is acked. Where a block is somebody else's by then, texts go wrong: `text` is the right.
Between events everybody's holds are counted, and held against the pools' users.
"""

import heapq
from collections import Counter

from shardlab.serve import BlockPool, Request, Scheduler, prefill_first
from shardlab.serve.cluster import Cluster
from shardlab.serve.events import Instance, Lost, Moved, Stepped
from shardlab.serve.metrics import finished
from shardlab.serve.router import RoundRobin
from shardlab.serve.simulate import Simulated, Wire
from shardlab.specs import LinkSpec

MODULUS, VOCAB = 2**31 - 1, 5
LINK = LinkSpec(name="slow", per_direction=40.0, alpha=0.01)


def state(before, token):
    """What is cached of a token."""
    return (31 * before + token + 7) % MODULUS


def text(request):
    """The tokens that must come back."""
    last, tokens = 0, []
    for token in request.prompt:
        last = state(last, token)
    while len(tokens) < request.new_tokens and request.stop not in tokens:
        tokens.append(last % VOCAB)
        last = state(last, tokens[-1])
    return tokens


class Troubled(Simulated):
    """`failing` transfers, by serial, come to nothing. `drain` seconds go by before a cancelled one lets go, `report`
    seconds before a step's tokens are known. `at(seconds, what)` calls `what()` then."""

    def __init__(self, wire=None, failing=(), drain=0.4, report=0.0, step_time=None):
        super().__init__(step_time or (lambda instance, work: 0.05 + 0.01 * sum(new for new, _ in work)), wire)
        self.failing, self.drain, self.report = set(failing), drain, report
        self.memory, self.seen, self.cancelled = {}, {}, []

    def at(self, when, what):
        self._at(when, what)

    def run(self, instance, batch, streams=()):
        items = [item._replace(tokens=list(item.tokens), blocks=list(item.blocks)) for item in batch.items]
        takes = self.step_time(instance, batch.work)
        self._at(self._now + takes, lambda: self._ended(instance, batch, items))
        for stream in streams:
            self._stream(stream, takes)

    def cancel(self, transfer):
        assert transfer.state == "draining"
        self.cancelled.append(transfer)
        self._at(self._now + self.drain, Moved(transfer, "drained"))

    def _stream(self, stream, takes):
        transfer = stream.transfer
        if transfer.serial not in self.seen:
            self.seen[transfer.serial] = transfer.had
            self._spoil(transfer)
        assert stream.start == self.seen[transfer.serial], "tokens are left out, or sent twice"
        self.seen[transfer.serial] = stream.stop
        assert stream.last == (stream.stop == transfer.tokens)
        super()._stream(stream, takes)

    def next(self):
        if not self._events:
            return None
        self._now, _, event = heapq.heappop(self._events)
        if callable(event):
            event = event()
        elif isinstance(event, Moved):
            event = self._moved(event)
        return event or self.next()

    def _ended(self, instance, batch, items):
        if instance.alive:
            self._at(self._now + self.report, Stepped(instance, batch, self._compute(instance, items)))

    def _moved(self, event):
        transfer, how = event
        if how == "acked" and transfer.state in ("draining", "dropped"):
            return None
        if how == "acked" and transfer.serial not in self.failing:
            for at in range(transfer.had, transfer.tokens):
                self._write(transfer.target, transfer.given, at, self._read(transfer.source, transfer.taken, at))
            return event
        self._spoil(transfer)  # and somebody may have written until now
        return Moved(transfer, "failed") if how == "acked" else event

    def _compute(self, instance, items):
        tokens = {}
        for item in items:
            last = self._read(instance, item.blocks, item.start - 1) if item.start else 0
            for at, token in enumerate(item.tokens, item.start):
                last = state(last, token)
                self._write(instance, item.blocks, at, last)
            if item.samples:
                tokens[item.number] = last % VOCAB
        return tokens

    def _spoil(self, transfer):
        for at in range(transfer.had, transfer.tokens):
            self._write(transfer.target, transfer.given, at, -1)

    def _write(self, instance, blocks, at, value):
        self.memory[instance, *self._place(instance, blocks, at)] = value

    def _read(self, instance, blocks, at):
        return self.memory[instance, *self._place(instance, blocks, at)]

    def _place(self, instance, blocks, at):
        return blocks[at // instance.pool.block_size], at % instance.pool.block_size


def instance(name, role="both", blocks=12, policy=None, **how):
    return Instance(name, Scheduler(BlockPool(blocks, 4), policy or prefill_first(16), **how), role)


def fleet(prefill=1, decode=1, both=0, **how):
    roles = ["prefill"] * prefill + ["decode"] * decode + ["both"] * both
    return [instance(f"{role}{i}", role, **how) for i, role in enumerate(roles)]


class Watched(Cluster):
    """A cluster whose steps are kept, and whose pools are looked at after each event; then `after(self)` is called."""

    def __init__(self, instances, world=None, after=lambda cluster: None, router=None, **how):
        self.plans, self.after, self.transfers = [], after, {}
        super().__init__(world or Troubled(wire()), instances, router or RoundRobin(),
                         watch=lambda instance, batch: self.plans.append((instance.name, batch.plan)), **how)

    def take(self, event):
        super().take(event)
        self.look()
        self.after(self)

    def look(self):
        """Everybody's holds are the pool's users, block by block."""
        for flight in self.flights.values():
            if flight.transfer:
                self.transfers[flight.transfer.serial] = flight.transfer
        holds = Counter()
        for each in self.instances:
            holds.update((each, block) for running in each.scheduler.running for block in running.blocks)
        for flight in self.flights.values():
            holds.update((flight.source, block) for block in flight.held or ())
        for transfer in self.transfers.values():
            if transfer.state not in ("freed", "dropped"):
                holds.update((transfer.source, block) for block in transfer.taken)
                holds.update((transfer.target, block) for block in transfer.given)
        for each in self.instances:
            assert each.pool.users == [holds[each, block] for block in range(each.pool.blocks)], each.name

    def lose(self, instance):
        """For `Troubled.at`: the instance is gone."""
        return lambda: Lost(instance)

    def leave(self, number):
        """For `Troubled.at`: the user is gone."""
        return lambda: self.look() if self.abort(number) else None


def wire(link=LINK, token_bytes=1.0, layers=4):
    return Wire(link, token_bytes, layers)


def settled(cluster, answers, aborted=()):
    """All is answered, and rightly; nothing is left anywhere."""
    for answer in answers:
        want = text(answer.request)
        assert answer.tokens == want[: len(answer.tokens)], f"request {answer.request.number} has another's cache"
        assert answer.times == sorted(answer.times) and len(answer.times) == len(answer.tokens)
        assert finished(answer) or answer.refused or answer.request.number in aborted, answer
    for each in cluster.instances:
        assert each.pool.free == each.pool.blocks and not any(each.pool.users), each.name
        assert each.outstanding == 0 and not each.scheduler.busy, each.name
    assert not cluster.flights and not cluster.handovers.draining
    assert {transfer.state for transfer in cluster.transfers.values()} <= {"freed", "dropped"}


def requests(lengths, new=5, gap=0.1, **how):
    """Prompts of these lengths, no two with the same beginning."""
    return [Request(i, [10 + i, *range(length - 1)], new, i * gap, **how) for i, length in enumerate(lengths)]
