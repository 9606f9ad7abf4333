"""What of a cache goes where: a transfer taken apart into messages, and put together again, compared.

The two sides may be cut differently, and their block tables always differ. A message names what it carries by the
model's own numbers, layer, KV heads, tokens, and where the target wants it, so that neither side has to know how the
other is cut. Of ranks that hold the same heads the first sends them. A transfer ends with a seal from each of the
source's ranks, that says how many messages there were: what is missing then, has come twice, or is not what was sent,
makes it fail. One that is given up ends with a cancel in its place, behind which nothing of it comes.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ..comm.channel import Channel, Closed, Pace, raw
from .events import Stream
from .pages import KVLayout, PagedCache, Store, quantise

Spoil = Callable[[dict, list[torch.Tensor]], bool]  # of a message, to be damaged; whether it is sent at all


@dataclass(frozen=True)
class Order:
    """Tokens `start` to `stop` of a transfer, as its source is told to send them: a `Stream` that can travel.

    `serial` is the transfer's, `number` its request's; `taken` and `given` are the block tables of source and target,
    which had the first `had` of all `tokens`.
    """

    serial: int
    number: int
    target: str
    had: int
    tokens: int
    taken: list[int]
    given: list[int]
    start: int
    stop: int
    last: bool

    @classmethod
    def of(cls, serial: int, stream: Stream) -> Order:
        transfer = stream.transfer
        return cls(serial, transfer.number, transfer.target.name, transfer.had, transfer.tokens, transfer.taken,
                   transfer.given, stream.start, stream.stop, stream.last)


@dataclass(frozen=True)
class Held:
    """What a rank tells of itself before anything is sent: whose model, what its blocks hold, and where it is."""

    spec: str
    layout: KVLayout

    def told(self) -> dict[str, Any]:
        layout = asdict(self.layout)
        return {"spec": self.spec, "layout": layout | {name: [layout[name].start, layout[name].stop]
                                                       for name in ("layers", "heads")}}

    @classmethod
    def heard(cls, told: dict[str, Any]) -> Held:
        layout = told["layout"]
        return cls(told["spec"], KVLayout(**layout | {name: range(*layout[name]) for name in ("layers", "heads")}))

    def unlike(self, other: Held) -> str:
        """Why what this rank holds can't be sent to the other; "" where it can."""
        if self.spec != other.spec:
            return f"one serves {self.spec}, the other {other.spec}"
        ours, theirs = self.layout, other.layout
        for name, what in (("dtype", "numbers of"), ("total_heads", "KV heads:"), ("key", "numbers a key:"),
                           ("value", "numbers a value:")):
            if getattr(ours, name) != getattr(theirs, name):
                return (f"one has {what} {getattr(ours, name)}, the other {getattr(theirs, name)}: caches are moved "
                        "as they are, give both sides the same")
        return ""


@dataclass(eq=False)
class Reached:
    """A rank of a target: the channel to it, its layout, and which of its layers and heads come from here."""

    channel: Channel
    layout: KVLayout
    layers: range
    heads: range
    gone: bool = False
    sent: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))  # messages, by transfer


def overlap(a: range, b: range) -> range:
    """What two ranges have in common."""
    return range(max(a.start, b.start), max(max(a.start, b.start), min(a.stop, b.stop)))


def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """CRC-32 of the bytes of all of them."""
    crc = 0
    for x in tensors:
        crc = zlib.crc32(raw(x.contiguous()), crc)
    return crc


class Outbox:
    """What a rank of a source sends to one target: a queue, and a thread that empties it, layer by layer.

    `wire` "int8" halves or quarters the bytes of a cache of other numbers, and rounds them. `ports` are the source's
    and the target's place on the link that `pace` keeps. `stopped(serial)` is called once nothing of a cancelled
    transfer is sent or read any more.
    """

    def __init__(self, cache: PagedCache, reached: list[Reached], stopped: Callable[[int], None], *,
                 broke: Callable[[BaseException], None], wire: str | None = None, pace: Pace | None = None,
                 ports: tuple[int, int] = (0, 0), spoil: Spoil | None = None):
        self.cache, self.reached, self.stopped, self.broke = cache, reached, stopped, broke
        self.wire, self.pace, self.ports, self.spoil = wire, pace, ports, spoil
        self._jobs: deque[tuple[float, Order, int | None]] = deque()  # ready since when, what, a layer or the seal
        self._cancels: deque[int] = deque()
        self._cancelled = set[int]()
        self._news = threading.Condition()
        threading.Thread(target=self._work, daemon=True).start()

    def put(self, order: Order, layers: Iterable[int]) -> None:
        """Send these layers of the tokens, which are computed and stay as they are until the transfer ends; after the
        last layer of the last tokens, the seal."""
        now = time.monotonic()
        with self._news:
            if order.serial not in self._cancelled:
                for layer in layers:
                    self._jobs.append((now, order, layer))
                    if order.last and layer == self.cache.layout.layers[-1]:
                        self._jobs.append((now, order, None))
                self._news.notify()

    def cancel(self, serial: int) -> None:
        """Send nothing more of the transfer than what is on its way, and say so, here and at the target."""
        with self._news:
            self._cancelled.add(serial)
            self._jobs = deque(job for job in self._jobs if job[1].serial != serial)
            self._cancels.append(serial)
            self._news.notify()

    def _work(self) -> None:
        try:
            while True:
                with self._news:
                    self._news.wait_for(lambda: self._jobs or self._cancels)
                    serial = self._cancels.popleft() if self._cancels else None
                    job = self._jobs.popleft() if serial is None else None
                if job is not None:
                    self._send(*job)
                elif serial is not None:
                    for each in self.reached:
                        self._tell(each, {"kind": "cancel", "serial": serial})
                        each.sent.pop(serial, None)
                    self.stopped(serial)
        except BaseException as error:
            self.broke(error)

    def _send(self, ready: float, order: Order, layer: int | None) -> None:
        for each in self.reached:
            if layer is None:
                self._tell(each, {"kind": "seal", "serial": order.serial, "had": order.had, "tokens": order.tokens,
                                  "messages": each.sent.pop(order.serial, 0)})
            elif layer in each.layers and not each.gone:
                self._layer(each, ready, order, layer)

    def _layer(self, each: Reached, ready: float, order: Order, layer: int) -> None:
        size, layers = each.layout.block_size, self.cache.layout.layers
        blocks, offsets = slots(order.taken, order.start, order.stop, self.cache.layout.block_size)
        first = self.cache.layout.heads.start
        heads = slice(each.heads.start - first, each.heads.stop - first)
        held = self.cache.layers[layer - layers.start]
        parts = [part.cpu() for store in (held.keys, held.values)
                 for part in self._packed(store.read(blocks, offsets, heads))]
        header = {"kind": "layer", "serial": order.serial, "layer": layer, "heads": [each.heads.start, each.heads.stop],
                  "had": order.had, "tokens": order.tokens, "start": order.start, "stop": order.stop,
                  "given": order.given[order.start // size : -(-order.stop // size)], "checksum": checksum(parts)}
        each.sent[order.serial] += 1
        if self.spoil is None or self.spoil(header, parts):
            nbytes = sum(part.nbytes for part in parts)
            self._tell(each, header, parts,
                       (0.0, 0.0) if self.pace is None else self.pace.book(*self.ports, nbytes, ready))

    def _packed(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        return list(quantise(parts[0])) if self.wire == "int8" and len(parts) == 1 else parts

    @staticmethod
    def _tell(each: Reached, header: dict, parts: Iterable[torch.Tensor] = (), due: tuple[float, float] = (0.0, 0.0)
              ) -> None:
        if not each.gone:
            try:
                each.channel.send(header, list(parts), due)
            except Closed:  # who started it will hear of its end, and give up what was on its way there
                each.gone = True


def slots(blocks: list[int], start: int, stop: int, size: int, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The block and the place in it of each of the tokens `start` to `stop`, of a table that begins with block number
    `first` of the sequence."""
    at = torch.arange(start, stop)
    return torch.tensor(blocks, dtype=torch.long)[at // size - first], at % size


class Incoming:
    """What has come of one transfer: how often each token of each layer and head, from whom how many messages."""

    def __init__(self, layout: KVLayout, had: int, tokens: int):
        self.layout, self.had = layout, had
        self.seen = torch.zeros(len(layout.layers), len(layout.heads), tokens - had, dtype=torch.uint8)
        self.came, self.sealed = defaultdict[int, int](int), dict[int, int]()  # messages, by the source's rank
        self.wrong = ""

    def mark(self, layer: int, heads: range, start: int, stop: int) -> None:
        self.seen[layer - self.layout.layers.start, heads.start - self.layout.heads.start :
                  heads.stop - self.layout.heads.start, start - self.had : stop - self.had] += 1

    def fault(self) -> str:
        """Why it can't be decoded from; "" where all of it has come once, as it was sent."""
        if self.wrong:
            return self.wrong
        for rank, messages in self.sealed.items():
            if messages != self.came[rank]:
                return f"rank {rank} of the source has sent {messages} messages, and {self.came[rank]} have come"
        if (bad := (self.seen != 1).nonzero()).numel():
            layer, head, token = bad[0].tolist()
            return (f"layer {self.layout.layers[layer]}, head {self.layout.heads[head]}, token {self.had + token} has "
                    f"come {int(self.seen[layer, head, token])} times, and {len(bad) - 1} more like it")
        return ""


class Inbox:
    """What a rank of a target receives: a thread for each channel, which writes what comes into the cache.

    `tell(what, serial, why)` is called with "acked" when all of a transfer is there, "failed" when it never will be,
    and "drained" when nothing more of a cancelled one is written.
    """

    def __init__(self, cache: PagedCache, tell: Callable[[str, int, str], None],
                 broke: Callable[[BaseException], None]):
        self.cache, self.tell, self.broke = cache, tell, broke
        self._lock = threading.Lock()
        self._sources: defaultdict[str, set[int]] = defaultdict(set)  # their ranks that can still send
        self._incoming = dict[int, Incoming]()
        self._ended: defaultdict[int, set[int]] = defaultdict(set)  # ranks that have cancelled, by transfer
        self._draining = dict[int, str]()  # transfers that are to be drained, and their sources

    def open(self, source: str, rank: int, channel: Channel) -> None:
        """Take what that rank sends, until it ends."""
        with self._lock:
            self._sources[source].add(rank)
        threading.Thread(target=self._work, args=(source, rank, channel), daemon=True).start()

    def cancel(self, serial: int, source: str) -> None:
        """Say when nothing of this transfer will be written any more."""
        with self._lock:
            self._draining[serial] = source
            self._drain()

    def _work(self, source: str, rank: int, channel: Channel) -> None:
        try:
            while True:
                header, parts = channel.recv()
                with self._lock:
                    self._take(source, rank, header, parts)
        except Closed:
            with self._lock:
                self._sources[source].discard(rank)
                self._drain()
        except BaseException as error:
            self.broke(error)

    def _take(self, source: str, rank: int, header: dict, parts: list[torch.Tensor]) -> None:
        kind, serial = header["kind"], header["serial"]
        if kind == "cancel":
            self._ended[serial].add(rank)
            self._drain()
            return
        if serial not in self._incoming:
            self._incoming[serial] = Incoming(self.cache.layout, header["had"], header["tokens"])
        incoming = self._incoming[serial]
        if kind == "layer":
            incoming.came[rank] += 1
            self._write(incoming, header, parts)
            return
        incoming.sealed[rank] = header["messages"]
        if incoming.sealed.keys() >= self._sources[source]:
            fault = incoming.fault()
            del self._incoming[serial]
            self.tell("failed" if fault else "acked", serial, fault)

    def _write(self, incoming: Incoming, header: dict, parts: list[torch.Tensor]) -> None:
        layer, heads, start, stop = header["layer"], range(*header["heads"]), header["start"], header["stop"]
        if header["checksum"] != checksum(parts):
            incoming.wrong = f"layer {layer} of tokens {start} to {stop} is not what was sent: its checksum differs"
        if incoming.wrong:
            return
        layout = self.cache.layout
        blocks, offsets = slots(header["given"], start, stop, layout.block_size, start // layout.block_size)
        held = self.cache.layers[layer - layout.layers.start]
        where = slice(heads.start - layout.heads.start, heads.stop - layout.heads.start)
        half = len(parts) // 2
        for store, its in ((held.keys, parts[:half]), (held.values, parts[half:])):
            store.write(blocks, offsets, where, _unpacked(its, store))
        incoming.mark(layer, heads, start, stop)

    def _drain(self) -> None:
        for serial, source in list(self._draining.items()):
            if self._ended[serial] >= self._sources[source]:
                del self._draining[serial], self._ended[serial]
                self._incoming.pop(serial, None)
                self.tell("drained", serial, "")


def _unpacked(parts: list[torch.Tensor], store: Store) -> list[torch.Tensor]:
    """What came, as the store holds it."""
    if len(parts) == 2 and store.scale is None:
        return [(parts[0].float() * parts[1].float()).to(store.data.dtype)]
    return parts

