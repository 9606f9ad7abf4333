"""The memory that the ranks of a host share, and how it is divided.

It is mapped before the ranks are forked, or passed on to processes that run already. Either way it has no name, so
there is nothing in /dev/shm to run out of, and nothing of it is left when its processes end.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import torch

from . import channels, desks, semaphore
from .channels import Channel
from .desks import Desk
from .semaphore import Semaphore

SIZE = 60 * 2**20  # bytes mapped; only what is written to is ever used
DESKS, CHANNELS = 24 * 2**20, 35 * 2**20  # bytes of it for all desks, for all channels
LARGEST_SLOT, LARGEST_CHUNK = 2**22, 2**18  # bytes of data in a desk's slot, in a channel's
CHANNEL_SLOTS = 8  # 2 MiB in all on up to 4 ranks: what fits is sent at once, whatever its receiver is at
LINE = semaphore.SIZE  # everything begins at a cache line


class Segment:
    """Memory that `ranks` processes share, divided: semaphores, a desk for each rank, a channel for each pair.

    `path` is where other processes can `open` it, if they can.
    """

    def __init__(self, memory: mmap.mmap, ranks: int, path: str = ""):
        self._memory, self._ranks, self.path = memory, ranks, path
        self._base = self._end = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        bells = self._take(ranks, semaphore.SIZE)
        read = self._take(ranks * desks.SLOTS, semaphore.SIZE)
        self._meet, self._full, self._free = (self._take(ranks**2, semaphore.SIZE) for _ in range(3))
        self._semaphores = range(self._base, self._end, semaphore.SIZE)
        self.bells = [Semaphore(at) for at in bells]

        size = min(LARGEST_SLOT, _lines(DESKS // (ranks * desks.SLOTS) - desks.NOTE))
        slots = self._take(ranks * desks.SLOTS, size + desks.NOTE)
        self.desks = [Desk(tuple(slots[i : i + desks.SLOTS]), size, tuple(map(Semaphore, read[i : i + desks.SLOTS])))
                      for i in range(0, len(slots), desks.SLOTS)]
        self._chunk = min(LARGEST_CHUNK, _lines(CHANNELS // (ranks**2 * CHANNEL_SLOTS) - channels.NOTE))
        self._slots = self._take(ranks**2 * CHANNEL_SLOTS, self._chunk + channels.NOTE)
        assert self._end <= self._base + SIZE

    @classmethod
    def anonymous(cls, ranks: int) -> Segment:
        """Memory for `ranks` processes that will be forked from this one."""
        return cls(mmap.mmap(-1, SIZE), ranks)._ready()

    @classmethod
    def passed_on(cls, ranks: int) -> Segment:
        """Memory for `ranks` processes that run already; they `open` it at its `path`, while this one lives."""
        file = os.memfd_create("shardlab-shm")
        os.ftruncate(file, SIZE)
        return cls(mmap.mmap(file, SIZE), ranks, f"/proc/{os.getpid()}/fd/{file}")._ready()

    @classmethod
    def open(cls, path: str, ranks: int) -> Segment:
        """The segment that another process has passed on."""
        file = os.open(path, os.O_RDWR)
        try:
            return cls(mmap.mmap(file, SIZE), ranks)
        finally:
            os.close(file)

    def view(self, address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of `count` elements, 1 or more, that lies at an address of the segment."""
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=address - self._base)

    def meet(self, a: int, b: int) -> Semaphore:
        """What rank `a` tells rank `b` by that it is at a barrier."""
        return Semaphore(self._meet[a * self._ranks + b])

    def channel(self, src: int, dst: int) -> Channel:
        """The channel of the messages from one rank to another."""
        pair = src * self._ranks + dst
        slots = self._slots[pair * CHANNEL_SLOTS : (pair + 1) * CHANNEL_SLOTS]
        return Channel(src, dst, Semaphore(self._full[pair]), Semaphore(self._free[pair]), tuple(slots), self._chunk)

    def _take(self, count: int, size: int) -> range:
        """The addresses of `count` pieces of `size` bytes, which nothing else gets."""
        first, self._end = self._end, self._end + count * size
        return range(first, self._end, size)

    def _ready(self) -> Segment:
        """Set up the semaphores, before another process uses them."""
        for at in self._semaphores:
            Semaphore(at).make()
        return self


def _lines(nbytes: int) -> int:
    return nbytes // LINE * LINE
