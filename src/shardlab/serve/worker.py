"""A rank of a replica that works for a control plane in another process: it computes what it is told to, and sends and
receives caches meanwhile.

Three kinds of threads share a rank. The main one computes batches, one after the other. One hears commands, so that a
transfer can be stopped while a batch is computed. And each channel to or from another replica has its own, which reads
or writes blocks that belong to a transfer and so to nobody else.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist

from ..comm import Ledger, record
from ..comm.channel import Closed, Listener, Pace, connect
from ..model.transformer import Transformer
from ..parallel import layout as layouts
from ..specs import Layout, LinkSpec
from .batch import Batch
from .inbox import Inbox
from .outbox import Outbox, Reached, Spoil
from .pages import KVLayout, PagedCache
from .request import Limits
from .runner import Choose, Runner, packed, unpacked
from .transport import Held, Order, overlap, sends

COMMANDS, DATA = ".commands", ".data"  # what a rank's sockets are called, behind its path


@dataclass(frozen=True)
class Post:
    """What the ranks of a replica are told at their start. `sockets` are each replica's, one a rank, by name, and
    `targets` the names of those that this one sends to. `clocks` is the file of the link's."""

    name: str
    build: Callable[[], Transformer]
    layout: Layout
    blocks: int
    block_size: int
    dtype: str | None
    choose: Choose
    sockets: dict[str, list[str]]
    targets: list[str]
    link: LinkSpec | None
    clocks: str
    wire: str | None
    spoil: Spoil | None
    ledger: bool

    def port(self, name: str) -> int:
        """A replica's place on the link."""
        return list(self.sockets).index(name)


def work(group: dist.ProcessGroup, post: Post) -> Ledger:
    """Serve until told to stop, or until nobody is there to tell. Every rank of the replica runs it. What went between
    its ranks, and to others, comes back, if a ledger is wanted: it grows with every message."""
    with record() if post.ledger else nullcontext(Ledger()) as ledger:
        Worker(group, post).run()
    return ledger


class Worker:
    """One rank."""

    def __init__(self, group: dist.ProcessGroup, post: Post):
        self.post, self.rank = post, group.rank()
        path = post.sockets[post.name][self.rank]
        commands, data = Listener(path + COMMANDS), Listener(path + DATA)
        self.parent = commands.accept("the control plane")
        self.parent.send({"did": "started", "pid": os.getpid()})
        model, tensor_axis = post.build(), None
        if post.layout.world_size > 1:
            model, _, axes = layouts.cut(model, post.layout)
            tensor_axis = axes.tp
        layout = KVLayout.of(model, post.block_size, post.dtype)
        self.cache = PagedCache(layout, post.blocks, next(model.parameters()).device)
        self.held = Held(str(model.spec), layout)
        self.inbox = Inbox(self.cache, lambda what, serial, **more: self.tell(what, serial=serial, **more), self.broke)
        self.outboxes = dict[str, Outbox]()
        self.batches: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        threading.Thread(target=self.let_in, args=(data,), daemon=True).start()
        with suppress(Closed):  # another has ended: that is what is to be told, and is
            if self.reach(tensor_axis):
                self.tell("ready", limits=Limits.of(model.spec))
        self.runner = Runner(model, self.cache, group if group.size() > 1 else None, choose=post.choose)
        threading.Thread(target=self.hear, daemon=True).start()

    def run(self) -> None:
        while (told := self.batches.get()) is not None:
            orders = [Order(**order) for order in told["orders"]]
            self.cache.written = partial(self.written, orders) if orders else None
            tokens = self.runner.run(unpacked(told["batch"]))
            if self.runner.leads:
                self.tell("ran", tokens=list((tokens or {}).items()))

    def written(self, orders: list[Order], layer: int, batch: Batch) -> None:
        """A layer's keys and values of a batch are in the cache: those that are to be sent can go."""
        numbers = {item.number for item in batch.items}
        for order in orders:
            if order.number in numbers:
                self.send(order, range(layer, layer + 1))

    def send(self, order: Order, layers: range) -> None:
        if order.target in self.outboxes:
            self.outboxes[order.target].put(order, layers)

    def hear(self) -> None:
        """Take commands, those about transfers at once."""
        try:
            while True:
                told, _ = self.parent.recv()
                match told["do"]:
                    case "run":
                        self.batches.put(told)
                    case "send":
                        self.send(Order(**told["order"]), self.cache.layout.layers)
                    case "cancel":
                        self.cancel(told["serial"], told["source"], told["target"])
                    case "stop":
                        break
        except Closed:
            pass
        except BaseException as error:
            self.broke(error)
        self.batches.put(None)

    def cancel(self, serial: int, source: str, target: str) -> None:
        if target == self.post.name:
            self.inbox.cancel(serial, source)
        elif target in self.outboxes:
            self.outboxes[target].cancel(serial)
        else:
            self.tell("drained", serial=serial)

    def reach(self, tensor_axis: dist.ProcessGroup | None) -> bool:
        """Open a channel to every rank of the targets that gets something from here; whether all can take it."""
        post, layout = self.post, self.held.layout
        heads = sends(layout, *(tensor_axis.rank(), tensor_axis.size()) if tensor_axis else (0, 1))
        pace = Pace(post.link, post.clocks) if post.link is not None else None
        for name in post.targets:
            reached = list[Reached]()
            for rank, path in enumerate(post.sockets[name]):
                channel = connect(path + DATA, f"rank {rank} of {name}")
                other = Held.heard(channel.recv()[0])
                if why := self.held.unlike(other):
                    self.tell("refused", why=f"{post.name} can't send its caches to {name}: {why}")
                    return False
                common = Reached(channel, other.layout, overlap(layout.layers, other.layout.layers),
                                 overlap(heads, other.layout.heads))
                if common.layers and common.heads:
                    channel.send({"from": post.name, "rank": self.rank})
                    channel.recv()
                    reached.append(common)
                else:
                    channel.close()
            if reached:
                self.outboxes[name] = Outbox(
                    self.cache, reached, lambda serial: self.tell("drained", serial=serial), broke=self.broke,
                    wire=post.wire, pace=pace, ports=(post.port(post.name), post.port(name)), spoil=post.spoil)
        return True

    def let_in(self, listener: Listener) -> None:
        """Tell those who connect what is held here, and take what they send."""
        try:
            while True:
                channel = listener.accept("a source")
                try:
                    channel.send(self.held.told())
                    told, _ = channel.recv()
                    channel.name = f"rank {told['rank']} of {told['from']}"
                    self.inbox.open(told["from"], told["rank"], channel)
                    channel.send({})
                except Closed:  # it gets nothing from there
                    channel.close()
        except BaseException as error:
            self.broke(error)

    def tell(self, what: str, **more: Any) -> None:
        self.parent.send({"did": what, **more})

    def broke(self, error: BaseException) -> None:
        """A thread has come to an end that it should not: say so, for nobody waits for it."""
        if not isinstance(error, Closed):
            self.tell("broke", why="".join(traceback.format_exception(error)))


def run_command(batch: Batch, orders: list[Order]) -> dict[str, Any]:
    """What all ranks of a replica are told, to compute a batch and send these tokens' caches meanwhile."""
    return {"do": "run", "batch": packed(batch), "orders": [vars(order) for order in orders]}

