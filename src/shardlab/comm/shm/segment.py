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

SIZE = 48 * 2**20  # bytes mapped; only what is written to is ever used
DESKS, CHANNELS = 32 * 2**20, 15 * 2**20  # bytes of it for all desks, for all channels
LARGEST_SLOT, LARGEST_CHUNK = 2**22, 2**18  # bytes of data in a desk's slot, in a channel's
CHANNEL_SLOTS = 4
LINE = semaphore.SIZE  # everything begins at a cache line


class Segment:
    """Memory that `ranks` processes share, divided: semaphores, a desk for each rank, a channel for each pair."""

    def __init__(self, memory: mmap.mmap, ranks: int):
        self._memory, self.path = memory, ""
        self._base = self._end = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        numbers = range(ranks)
        self.bells = self._semaphores(ranks)
        self.meet, full, free = ([self._semaphores(ranks) for _ in numbers] for _ in range(3))
        read = [self._semaphores(desks.SLOTS) for _ in numbers]
        self._semaphores_end = self._end

        size = min(LARGEST_SLOT, _lines(DESKS // (ranks * desks.SLOTS) - desks.NOTE))
        self.desks = [Desk(self._slots(desks.SLOTS, size + desks.NOTE), size, tuple(read[rank])) for rank in numbers]
        size = min(LARGEST_CHUNK, _lines(CHANNELS // (ranks**2 * CHANNEL_SLOTS) - channels.NOTE))
        self.channels = [[Channel(a, b, full[a][b], free[a][b], self._slots(CHANNEL_SLOTS, size + channels.NOTE), size)
                          for b in numbers] for a in numbers]
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
        segment = cls(mmap.mmap(file, SIZE), ranks)._ready()
        segment.path = f"/proc/{os.getpid()}/fd/{file}"
        return segment

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

    def _semaphores(self, count: int) -> list[Semaphore]:
        first, self._end = self._end, self._end + count * semaphore.SIZE
        return [Semaphore(first + i * semaphore.SIZE) for i in range(count)]

    def _slots(self, count: int, size: int) -> tuple[int, ...]:
        first, self._end = self._end, self._end + count * size
        return tuple(first + i * size for i in range(count))

    def _ready(self) -> Segment:
        """Set up the semaphores, before another process uses them."""
        for at in range(self._base, self._semaphores_end, semaphore.SIZE):
            Semaphore(at).make()
        return self


def _lines(nbytes: int) -> int:
    return nbytes // LINE * LINE
