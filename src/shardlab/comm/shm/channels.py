"""Messages between two ranks of a host: a channel for each ordered pair, a row of slots that chunks pass through.

    sender       waits until a slot is free, copies a chunk in, posts `full`
    receiver     waits for `full`, copies the chunk out, posts `free`

The first slot of a message says what it is. A send is done when the receiver has taken all of it, so two ranks that
both wait for their sends before they receive wait for ever, as they do on gloo.
"""

from __future__ import annotations

import ctypes
import struct
from collections import deque
from dataclasses import dataclass

import torch

from ..disagreement import of_message
from .semaphore import Semaphore
from .waiting import Waiting

HEADER = struct.Struct("<QH502s")  # bytes of the message, bytes of its text, text
NOTE = HEADER.size
ROOM = 502  # bytes of it for the text, which is cut if it is longer


def copy(into: int, out_of: int, nbytes: int) -> None:
    """Copy `nbytes` between two addresses."""
    if nbytes:
        _memmove(into, out_of, nbytes)


_memmove = ctypes.PyDLL(None).memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = None


@dataclass(frozen=True)
class Channel:
    """One direction between two ranks: where its slots are, each a header and then `size` bytes for a chunk."""

    src: int
    dst: int
    full: Semaphore
    free: Semaphore
    slots: tuple[int, ...]  # addresses
    size: int

    def __str__(self) -> str:
        return f"from rank {self.src} to rank {self.dst}"


class Pending:
    """A message under way. Its tensor has to stay as it is until `wait()` has returned."""

    def __init__(self, end: Outgoing | Incoming, x: torch.Tensor, text: str):
        self._end, self.x, self.text = end, x, text
        self.at, self.nbytes, self.moved = x.data_ptr(), x.numel() * x.element_size(), 0
        self.error: ValueError | None = None
        self.done = False

    def wait(self) -> None:
        """Block until the message has been taken, moving all others meanwhile.

        Raises ValueError where it is another message that has come, and RuntimeError at the limit of a wait.
        """
        if not self.done:
            self._end.waiting.until(lambda: self.done, f"{self._end} {self.text}")
        if self.error is not None:
            raise self.error


class Outgoing:
    """The sender's end."""

    def __init__(self, waiting: Waiting, channel: Channel):
        self.waiting, self._channel = waiting, channel
        self._unsent: deque[Pending] = deque()
        self._untaken: deque[tuple[Pending, int]] = deque()  # with the count of slots at which it has been taken
        self._filled = self._freed = 0

    def __str__(self) -> str:
        return f"rank {self._channel.dst} to take"

    def start(self, x: torch.Tensor, text: str) -> Pending:
        message = Pending(self, x, text)
        self._unsent.append(message)
        self.waiting.moving[self] = None
        self.advance()
        return message

    def advance(self) -> None:
        channel = self._channel
        while True:
            while self._freed < self._filled and self.waiting.take(channel.free):
                self._freed += 1
            if not self._unsent or self._filled - self._freed == len(channel.slots):
                break
            self._put(self._unsent[0])
        while self._untaken and self._freed >= self._untaken[0][1]:
            self._untaken.popleft()[0].done = True
        if not self._unsent and not self._untaken:
            self.waiting.moving.pop(self, None)

    def _put(self, message: Pending) -> None:
        """Fill the next slot with the message's next chunk."""
        channel = self._channel
        slot = channel.slots[self._filled % len(channel.slots)]
        if not message.moved:
            text = message.text.encode()[: ROOM]
            ctypes.memmove(slot, HEADER.pack(message.nbytes, len(text), text), NOTE)
        size = min(channel.size, message.nbytes - message.moved)
        copy(slot + NOTE, message.at + message.moved, size)
        message.moved += size
        self._filled += 1
        self.waiting.post(channel.full, channel.dst)
        if message.moved == message.nbytes:
            self._untaken.append((self._unsent.popleft(), self._filled))


class Incoming:
    """The receiver's end."""

    def __init__(self, waiting: Waiting, channel: Channel):
        self.waiting, self._channel = waiting, channel
        self._expected: deque[Pending] = deque()
        self._taken = 0
        self._coming: int | None = None  # bytes still to come of the message at hand

    def __str__(self) -> str:
        return f"rank {self._channel.src} to send"

    def start(self, x: torch.Tensor, text: str) -> Pending:
        message = Pending(self, x, text)
        self._expected.append(message)
        self.waiting.moving[self] = None
        self.advance()
        return message

    def advance(self) -> None:
        while self._expected and self.waiting.take(self._channel.full):
            self._get(self._expected[0])
        if not self._expected:
            self.waiting.moving.pop(self, None)

    def _get(self, message: Pending) -> None:
        """Empty the next slot into the message's tensor; drop what was not meant for it."""
        channel = self._channel
        slot = channel.slots[self._taken % len(channel.slots)]
        if self._coming is None:
            self._coming, length, text = HEADER.unpack(ctypes.string_at(slot, NOTE))
            self._check(message, self._coming, text[:length].decode(errors="replace"))
        size = min(channel.size, self._coming)
        if message.error is None:
            copy(message.at + message.moved, slot + NOTE, size)
        message.moved += size
        self._coming -= size
        self._taken += 1
        self.waiting.post(channel.free, channel.src)
        if not self._coming:
            self._coming = None
            self._expected.popleft().done = True

    def _check(self, message: Pending, nbytes: int, text: str) -> None:
        expected = message.text.encode()[:ROOM].decode(errors="replace")
        src, dst = self._channel.src, self._channel.dst
        if words := of_message(src, dst, (text, nbytes), (expected, message.nbytes)):
            message.error = ValueError(words)
