"""How a rank waits for others: it looks often for a moment, then sleeps until it is woken, and gives up at a limit.

Between two ranks everything is told by a semaphore of their own. The rank that posts it then rings the other's bell,
one more semaphore: so a rank with several messages under way sleeps on its bell alone, and looks at all of them when
it wakes. The bell is rung after the post, so no post is slept through.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Protocol

from .semaphore import Semaphore

LOOKING = 5e-4  # seconds before it sleeps, which costs about that where the core had nothing else to do
SLICE = 0.25  # seconds asleep before the limit is looked at


class Moving(Protocol):
    """One end of a channel with messages under way."""

    def advance(self) -> None:
        """Move what can be moved now."""


class Waiting:
    """The waits of one rank. `bells` are those of all ranks; `limit` in seconds, for one wait."""

    def __init__(self, rank: int, bells: list[Semaphore], limit: float):
        self._bells, self._bell, self._limit = bells, bells[rank], limit
        self._taken = 0
        self.moving: dict[Moving, None] = {}  # a set that keeps its order

    def post(self, semaphore: Semaphore, peer: int) -> None:
        """Tell `peer` by `semaphore`, and wake it."""
        semaphore.post()
        self._bells[peer].post()

    def take(self, semaphore: Semaphore) -> bool:
        """Take from the semaphore if it has been posted, and with it the ring that came along."""
        if not semaphore.take():
            return False
        self._bell.take()
        self._taken += 1
        return True

    def acquire(self, semaphore: Semaphore, what: str) -> None:
        """Wait until the semaphore is posted. Messages under way are moved meanwhile.

        Raises RuntimeError at the limit, saying `what` it waited for.
        """
        if self.take(semaphore):
            return
        if self.moving:
            self.until(lambda: self.take(semaphore), what)
            return
        start = time.monotonic()
        while time.monotonic() < start + LOOKING:
            os.sched_yield()
            if self.take(semaphore):
                return
        while not semaphore.take_within(SLICE):
            self._check(start, what)
        self._bell.take()

    def until(self, done: Callable[[], bool], what: str) -> None:
        """Wait until `done()`, moving the messages under way, as `acquire` does."""
        start = looking = time.monotonic()
        while True:
            taken = self._taken
            self.advance()
            if done():
                return
            if self._taken > taken:  # perhaps with a ring that came during this look: not to sleep before another
                looking = time.monotonic()
            elif time.monotonic() < looking + LOOKING:
                os.sched_yield()
            else:
                self._bell.take_within(SLICE)
                self._check(start, what)

    def advance(self) -> None:
        for end in tuple(self.moving):
            end.advance()

    def _check(self, start: float, what: str) -> None:
        if time.monotonic() > start + self._limit:
            raise RuntimeError(f"waited {self._limit:g} s for {what}")
