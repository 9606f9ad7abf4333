"""The sending side of transfers: what a rank sends to one target, layer by layer, in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from ..comm.channel import Channel, Closed, Pace
from .pages import KVLayout, PagedCache, quantise
from .transport import Order, checksum, slots

Spoil = Callable[[dict, list[torch.Tensor]], bool]  # of a message, to be damaged; whether it is sent at all


@dataclass(eq=False)
class Reached:
    """A rank of a target: the channel to it, its layout, and which of its layers and heads come from here."""

    channel: Channel
    layout: KVLayout
    layers: range
    heads: range
    gone: bool = False
    sent: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))  # messages, by transfer


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
        if self.wire != "int8" or len(parts) == 2:  # with scales it is bytes already
            return parts
        numbers, scale = quantise(parts[0])
        return [numbers.to(torch.int8), scale]

    @staticmethod
    def _tell(each: Reached, header: dict, parts: Iterable[torch.Tensor] = (), due: tuple[float, float] = (0.0, 0.0)
              ) -> None:
        if not each.gone:
            try:
                each.channel.send(header, list(parts), due)
            except Closed:  # who started it will hear of its end, and give up what was on its way there
                each.gone = True
