"""The flight recorder: what a rank was doing, readable after it can no longer say so itself.

A rank writes the collective that it enters into a small memory-mapped file. When the rank hangs or is killed, the
file still tells its launcher which collective that was, with shape and peers. One recorder a process, since a rank
is a process.
"""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path

SIZE = 4096
HEAD = struct.Struct("<BdH")  # state, CLOCK_MONOTONIC seconds (one clock for all processes of a host), length of text
NEVER, INSIDE, LEFT = 0, 1, 2


class Recorder:
    """Writes enter and leave marks into the file at `path` (made if missing), at a microsecond or two a mark."""

    def __init__(self, path: str | Path):
        with Path(path).open("wb+") as file:
            file.truncate(SIZE)
            self._map = mmap.mmap(file.fileno(), SIZE)

    def enter(self, text: str) -> None:
        data = text.encode()[: SIZE - HEAD.size]
        self._map[HEAD.size : HEAD.size + len(data)] = data
        HEAD.pack_into(self._map, 0, INSIDE, time.monotonic(), len(data))

    def leave(self) -> None:
        _, _, length = HEAD.unpack_from(self._map, 0)
        HEAD.pack_into(self._map, 0, LEFT, time.monotonic(), length)


_recorder: Recorder | None = None


def open(path: str | Path) -> None:
    """Start recording this process's collectives into the file at `path`; called once a rank, by the launcher."""
    global _recorder
    _recorder = Recorder(path)


def enter(text: str) -> None:
    """Mark that this rank enters the collective described by `text`. Nothing happens where no recorder is open."""
    if _recorder is not None:
        _recorder.enter(text)


def leave() -> None:
    """Mark that this rank came out of the collective it entered last."""
    if _recorder is not None:
        _recorder.leave()


def read(path: str | Path) -> str:
    """What the rank that writes to `path` was last seen doing, as half a sentence for a report."""
    try:
        data = Path(path).read_bytes()
    except OSError:
        return "no collective entered yet"
    if len(data) < HEAD.size:
        return "no collective entered yet"
    state, when, length = HEAD.unpack_from(data)
    text, age = data[HEAD.size : HEAD.size + length].decode(errors="replace"), time.monotonic() - when
    if state == INSIDE:
        return f"in {text}, for {age:.1f} s"
    if state == LEFT:
        return f"in its own code for {age:.1f} s, after {text}"
    return "no collective entered yet"
