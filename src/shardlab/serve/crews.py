"""Replicas as processes: their start, what is said to them and what they say, their end, however it comes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from ..comm import Ledger
from ..comm.channel import Channel, Closed, connect
from ..launch import Ranks, ranks
from .replica import Replica
from .request import Limits
from .worker import COMMANDS, Post, work

START_LIMIT = 120.0  # seconds until all replicas have built their models and found each other
STOP_LIMIT = 10.0  # seconds for a rank to return once it is told to stop
LOOK_AGAIN = 0.5  # seconds until it is looked whether a replica that does not listen yet has ended instead

Said = tuple[str, int, Any]  # replica, rank, and what it says; rank −1: how the replica has ended, None or an error


class Crews:
    """The ranks of some replicas, each replica's started apart: they end apart too.

    `post(name, sockets, clocks)` is what a replica's ranks are told. `timeout` is how long they live at most, in
    seconds, `threads` how many PyTorch has in each.
    """

    def __init__(self, replicas: Sequence[Replica], post: Callable[[str, dict[str, list[str]], str], Post],
                 timeout: float, threads: int):
        if len({replica.name for replica in replicas}) < len(replicas):
            raise ValueError("two replicas have the same name, by which they are known")
        self.pids: dict[str, list[int]] = {}
        self.limits: dict[str, Limits] = {}  # of each replica's model
        self.ledgers: dict[str, list[Ledger]] = {}  # of each replica's ranks, once it was closed
        self.ended: dict[str, Exception | None] = {}
        self._channels: dict[str, list[Channel]] = {}
        self._said: SimpleQueue[Said] = SimpleQueue()
        self._threads: dict[str, threading.Thread] = {}
        self._ranks = {each.name: ranks(each.layout.world_size, backend="gloo", timeout=timeout, threads=threads)
                       for each in replicas}
        try:
            self._start(post)
        except BaseException:
            self.close()
            raise

    def size(self, name: str) -> int:
        """How many ranks a replica has."""
        return self._ranks[name].size

    def tell(self, name: str, command: dict[str, Any]) -> None:
        """Say something to all ranks of a replica. One that has ended does not hear it."""
        for channel in self._channels.get(name, ()):
            with suppress(Closed):
                channel.send(command)

    def hear(self, timeout: float | None = None) -> Said:
        """What is said next. Raises queue.Empty after `timeout` seconds."""
        name, rank, said = self._said.get(timeout=timeout)
        if rank < 0:
            self.ended[name] = said
        return name, rank, said

    def kill(self, name: str) -> None:
        """End a replica as the system does when memory runs out."""
        for pid in self.pids.get(name, ()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """End all; returns when they are gone."""
        for name in self._channels:
            self.tell(name, {"do": "stop"})
        deadline = time.monotonic() + STOP_LIMIT
        for name, thread in self._threads.items():
            thread.join(max(0.0, deadline - time.monotonic()) if name in self.pids else 0.0)
            if thread.is_alive():
                self.kill(name)
                thread.join(LOOK_AGAIN)
        for each in self._ranks.values():
            each.close()
        for channel in (each for channels in self._channels.values() for each in channels):
            channel.close()

    def _start(self, post: Callable[[str, dict[str, list[str]], str], Post]) -> None:
        with ThreadPoolExecutor(len(self._ranks)) as several:
            folders = dict(zip(self._ranks, several.map(Ranks.start, self._ranks.values()), strict=True))
        sockets = {name: [str(folder / f"{rank}") for rank in range(self.size(name))]
                   for name, folder in folders.items()}
        clocks = str(next(iter(folders.values())) / "link")
        for name in self._ranks:
            self._threads[name] = threading.Thread(target=self._run, args=(name, post(name, sockets, clocks)),
                                                   daemon=True)
            self._threads[name].start()
        deadline = time.monotonic() + START_LIMIT
        for name, paths in sockets.items():
            self._channels[name] = []
            for rank, path in enumerate(paths):
                self._channels[name].append(channel := self._connect(name, rank, path + COMMANDS, deadline))
                threading.Thread(target=self._listen, args=(name, rank, channel), daemon=True).start()
        self._all_ready(deadline)

    def _connect(self, name: str, rank: int, path: str, deadline: float) -> Channel:
        while True:
            with suppress(TimeoutError):
                return connect(path, f"rank {rank} of {name}", LOOK_AGAIN)
            if time.monotonic() > deadline or not self._threads[name].is_alive():
                self._all_ready(deadline)  # it says why not

    def _all_ready(self, deadline: float) -> None:
        """Wait until all ranks say that they are. Raises the error of a replica that has ended instead, ValueError
        where one refuses another, and RuntimeError at the deadline."""
        waits = {(name, rank) for name in self._ranks for rank in range(self.size(name))}
        while waits:
            try:
                name, rank, said = self.hear(max(0.0, deadline - time.monotonic()))
            except Empty:
                raise RuntimeError(f"not ready after {START_LIMIT:g} s: " + ", ".join(
                    f"rank {rank} of {name}" for name, rank in sorted(waits))) from None
            if rank < 0:
                raise said or RuntimeError(f"{name} has ended before it was ready")
            match said["did"]:
                case "started":
                    self.pids.setdefault(name, []).append(said["pid"])
                case "refused":
                    raise ValueError(said["why"])
                case "broke":
                    raise RuntimeError(f"a thread of rank {rank} of {name} has failed:\n{said['why']}")
                case "ready":
                    self.limits[name] = Limits(*said["limits"])
                    waits.discard((name, rank))

    def _run(self, name: str, post: Post) -> None:
        """The thread of a replica's ranks, from their start to their end."""
        error: Exception | None = None
        try:
            self.ledgers[name] = self._ranks[name].run(work, post)
        except Exception as its:
            error = its
        self._said.put((name, -1, error))

    def _listen(self, name: str, rank: int, channel: Channel) -> None:
        with suppress(Closed):
            while True:
                self._said.put((name, rank, channel.recv()[0]))
