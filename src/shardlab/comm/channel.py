"""Messages between processes that are in no process group together: ranks that were started apart, so that the end of
some is not the end of the others.

A channel is a stream through a Unix-domain socket: a header, JSON, and the bytes of tensors behind it. Nothing is ever
unpickled. Messages of a channel arrive in the order in which they were sent. Where a link is given, a message takes its
bytes/β on it and arrives α later, as in `links`: the sender sleeps until it would have left, the receiver until it
would have come.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ..specs import LinkSpec
from . import links, mark

LENGTH = struct.Struct("<I")  # of the header, in bytes
LONGEST = 100  # bytes of a socket's path: Linux takes 107, macOS 103
LOOK_AGAIN = 0.01  # seconds until somebody who does not listen yet is tried again


def raw(x: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, shared with it."""
    return memoryview(x.flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]


class Closed(EOFError):
    """The other end is closed, or its process has ended."""


class Pace:
    """A link between two of several places, each with one port out and one in, which all processes that open the same
    `clocks` file share."""

    def __init__(self, link: LinkSpec, clocks: str | Path):
        self.link, self._nics = link, links.Nics(clocks)
        self._booking = threading.Lock()  # between threads: the file's own lock is between processes

    def book(self, out: int, into: int, nbytes: int, since: float) -> tuple[float, float]:
        """(when the last byte has left, when it has come), monotonic seconds, for a message that is ready `since`."""
        with self._booking:
            left = self._nics.book((out, links.MOST + into), nbytes / self.link.per_direction, since)
        return left, left + (self.link.alpha or 0.0)


class Channel:
    """One end. `name` says in errors and ledgers who is at the other one."""

    def __init__(self, sock: socket.socket, name: str = "the other end"):
        self._socket, self.name = sock, name
        self._sending = threading.Lock()

    def send(self, header: dict[str, Any], tensors: Sequence[torch.Tensor] = (), due: tuple[float, float] = (0.0, 0.0)
             ) -> None:
        """Send what JSON can say, and tensors; from any thread, one after the other. `due` is when the message leaves
        and comes (`Pace.book`); returns when it has left. Raises Closed."""
        flat = [x.detach().cpu().contiguous() for x in tensors]
        nbytes = sum(x.nbytes for x in flat)
        head = json.dumps([header, due[1], [(str(x.dtype).removeprefix("torch."), list(x.shape)) for x in flat]])
        with self._sending:
            gone = mark.outside(self.name, flat, nbytes)
            try:
                self._socket.sendall(LENGTH.pack(len(head)) + head.encode())
                for x in flat:
                    if x.nbytes:
                        self._socket.sendall(raw(x))
            except OSError as error:
                raise Closed(f"{self.name} is gone: {error}") from None
            links.sleep_until(due[0])
            gone()

    def recv(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """The next message: its header, and tensors of its own. Raises Closed at the end of the stream."""
        (length,) = LENGTH.unpack(self._read(bytearray(LENGTH.size)))
        header, due, kinds = json.loads(bytes(self._read(bytearray(length))))
        tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, shape in kinds]
        for x in tensors:
            if x.nbytes:
                self._read(raw(x))
        links.sleep_until(due)
        return header, tensors

    def _read(self, into: bytearray | memoryview) -> bytearray | memoryview:
        view = memoryview(into)
        done = 0
        while done < len(view):
            try:
                count = self._socket.recv_into(view[done:])
            except OSError:
                count = 0
            if not count:
                raise Closed(f"{self.name} has closed the channel" + (
                    f" after {done} of {len(view)} bytes of a message" if done else ""))
            done += count
        return into

    def close(self) -> None:
        """End it, for both sides; who waits for a message gets Closed."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Listener:
    """Where others `connect` to: the file at `path`, which its folder's owner removes with the folder."""

    def __init__(self, path: str | Path):
        path = _short(path)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(path)
        self._socket.listen(64)

    def accept(self, name: str = "the other end") -> Channel:
        """The next who connects. Raises Closed once the listener is."""
        try:
            return Channel(self._socket.accept()[0], name)
        except OSError as error:
            raise Closed(f"nobody can connect any more: {error}") from None

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def connect(path: str | Path, name: str = "the other end", limit: float = 60.0) -> Channel:
    """A channel to who listens at `path`, or will within `limit` seconds. Raises TimeoutError."""
    path, deadline = _short(path), time.monotonic() + limit
    while True:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(path)
            return Channel(sock, name)
        except (FileNotFoundError, ConnectionRefusedError):
            sock.close()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} did not listen at {path} within {limit:g} s") from None
            time.sleep(LOOK_AGAIN)


def _short(path: str | Path) -> str:
    if len(str(path).encode()) > LONGEST:
        raise ValueError(f"a socket's path has room for {LONGEST} bytes, and {path} is longer: set TMPDIR to a shorter "
                         "folder")
    return str(path)
