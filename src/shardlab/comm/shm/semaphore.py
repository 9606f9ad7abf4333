"""POSIX semaphores in memory that processes share: what the ranks of one host wait for each other with.

A rank that sees another's mark in shared memory has not thereby seen what the other wrote before it: on Arm the two may
arrive in either order. Semaphores settle that without a word of assembler: `sem_post` and a wait that succeeds
"synchronize memory" (POSIX.1-2017, XBD 4.12), so what was written before the post is there after the wait.
"""

from __future__ import annotations

import ctypes
import sys
import time

SIZE = 64  # bytes kept for one: a cache line of its own; glibc's takes 32 of them
MISSING = "" if sys.platform == "linux" else f"{sys.platform} has no unnamed POSIX semaphores"


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


# calls that return at once keep the interpreter's lock (a third faster), the one that blocks gives it up
_quick, _blocking = ctypes.PyDLL(None), ctypes.CDLL(None)


class Semaphore:
    """The semaphore at `address`: a count that `post` raises and that a take lowers, never below 0."""

    __slots__ = ("_at",)

    def __init__(self, address: int):
        self._at = ctypes.c_void_p(address)

    def make(self) -> None:
        """Set it up with a count of 0, before another process knows it."""
        if _quick.sem_init(self._at, 1, ctypes.c_uint(0)):
            raise RuntimeError("this system's C library has no semaphores for several processes")

    def post(self) -> None:
        _quick.sem_post(self._at)

    def take(self) -> bool:
        """Lower the count and say True, or False where it is 0."""
        return not _quick.sem_trywait(self._at)

    def take_within(self, seconds: float) -> bool:
        """The same, blocked for up to `seconds`; False sooner where a signal arrives."""
        end = time.clock_gettime(time.CLOCK_REALTIME) + seconds  # its deadline is one of the calendar clock
        until = _Timespec(int(end), int(end % 1 * 1e9))
        return not _blocking.sem_timedwait(self._at, ctypes.byref(until))
