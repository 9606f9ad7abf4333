"""Slow links on a fast machine: when a message would have left its network card, and when it would have come.

Ranks are placed on the nodes of a `specs.Topology`. A message over one of its links waits its turn at the network card
of its node, takes bytes/β there and at the receiving one, and arrives α later; sender and receiver sleep until then.
The cards' clocks are in a file that all ranks of the launch have mapped, so that they are shared as a real card is.
Nothing is really slowed, and no privileges are needed; what the machine itself takes comes on top where it is longer.
"""

from __future__ import annotations

import fcntl
import mmap
import time
from pathlib import Path

from ..specs import Topology

MOST = 256  # ranks
CLOCKS = ("card out", "card in", "inside out", "inside in")  # a time for each rank or node: when it is free again


class Nics:
    """The clocks in the file at `path`, made if missing: seconds of the host's monotonic clock."""

    def __init__(self, path: str | Path):
        self._file = Path(path).open("ab+")  # noqa: SIM115  open as long as the process lives, for its lock
        if self._file.seek(0, 2) < 8 * MOST * len(CLOCKS):
            self._file.truncate(8 * MOST * len(CLOCKS))
        self._free = memoryview(mmap.mmap(self._file.fileno(), 8 * MOST * len(CLOCKS))).cast("d")

    def book(self, ports: tuple[int, int], seconds: float, since: float | None = None) -> float:
        """Keep both ports busy for that long as soon as both are free, `since` then or from now on; when that is
        over."""
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            start = time.monotonic() if since is None else since
            left = max(start, *(self._free[port] for port in ports)) + seconds
            for port in ports:
                self._free[port] = left
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
        return left


_nics: Nics | None = None  # one a process, since a rank is a process


def open(path: str | Path) -> None:
    """Share the clocks in the file at `path` from now on; called once a rank, by the launcher."""
    global _nics
    _nics = Nics(path)


def book(topology: Topology | None, src: int, dst: int, nbytes: int) -> tuple[float, float]:
    """(when the last byte has left, when it has come), monotonic seconds, for a message that starts now.

    (0, 0) where nothing is to be waited for. Raises ValueError where ranks were not started by `launch`.
    """
    link = topology.link(src, dst) if topology else None
    if topology is None or link is None:
        return 0.0, 0.0
    if _nics is None:
        raise ValueError("links are slowed only between ranks that shardlab.launch has started on one host")
    left = _nics.book(_ports(topology, src, dst), nbytes / link.per_direction)
    return left, left + (link.alpha or 0.0)


def _ports(topology: Topology, src: int, dst: int) -> tuple[int, int]:
    """The clock that the message leaves by, and the one that it comes in by."""
    nodes = topology.node(src), topology.node(dst)
    if nodes[0] == nodes[1]:
        return 2 * MOST + src, 3 * MOST + dst
    return (nodes[0], MOST + nodes[1]) if topology.nic == "node" else (src, MOST + dst)


def sleep_until(when: float) -> None:
    """Return at `when`, in seconds of the host's monotonic clock."""
    if (left := when - time.monotonic()) > 0:
        time.sleep(left)
