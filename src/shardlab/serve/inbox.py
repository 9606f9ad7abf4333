"""The receiving side of transfers: what comes is compared, written where it belongs, and counted."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable

import torch

from ..comm.channel import Channel, Closed
from .pages import KVLayout, PagedCache, Store
from .transport import checksum, slots


class Incoming:
    """What has come of one transfer: how often each token of each layer and head, from whom how many messages."""

    def __init__(self, layout: KVLayout, had: int, tokens: int):
        self.layout, self.had = layout, had
        self.seen = torch.zeros(len(layout.layers), len(layout.heads), tokens - had, dtype=torch.uint8)
        self.came, self.sealed = defaultdict[int, int](int), dict[int, int]()  # messages, by the source's rank
        self.nbytes, self.wrong = 0, ""

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

    `tell(what, serial, …)` is called with "acked", and `nbytes`, when all of a transfer is there, "failed", and `why`,
    when it never will be, and "drained" when nothing more of a cancelled one is written.
    """

    def __init__(self, cache: PagedCache, tell: Callable[..., None],
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
            incoming.nbytes += sum(part.nbytes for part in parts)
            self._write(incoming, header, parts)
            return
        incoming.sealed[rank] = header["messages"]
        if incoming.sealed.keys() >= self._sources[source]:
            fault = incoming.fault()
            del self._incoming[serial]
            if fault:
                self.tell("failed", serial, why=fault)
            else:
                self.tell("acked", serial, nbytes=incoming.nbytes)

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
                self.tell("drained", serial)


def _unpacked(parts: list[torch.Tensor], store: Store) -> list[torch.Tensor]:
    """What came, as the store holds it."""
    if len(parts) == 2 and store.scale is None:
        return [(parts[0].float() * parts[1].float()).to(store.data.dtype)]
    return parts

