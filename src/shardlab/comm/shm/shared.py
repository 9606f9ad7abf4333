"""A rank's end of the memory that it shares with the other ranks of its host: messages, and direct collectives."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from .channels import Incoming, Outgoing, Pending
from .desks import Desks
from .direct import Combine, Direct
from .segment import Segment
from .waiting import Waiting


class Shared:
    """A rank's end of the segment. Ranks are global, tensors contiguous and on the CPU; any shape, dtype and length.

    `text` says what this rank is about to do; ranks of which it differs get a ValueError that says what each said.
    A collective returns the bytes that this rank has written into shared memory for it. A wait longer than `timeout`
    seconds raises RuntimeError.
    """

    def __init__(self, segment: Segment, rank: int, timeout: float):
        self.rank = rank
        self._waiting = Waiting(rank, segment.bells, timeout)
        ranks = range(len(segment.desks))
        self._outgoing = [Outgoing(self._waiting, segment.channel(rank, other)) for other in ranks]
        self._incoming = [Incoming(self._waiting, segment.channel(other, rank)) for other in ranks]
        self._direct = Direct(Desks(self._waiting, rank, segment.desks, segment.meet), segment.view)

    @property
    def moving(self) -> bool:
        """Whether messages are under way, which move only while this rank waits, or by `advance`."""
        return bool(self._waiting.moving)

    def advance(self) -> None:
        """Move what can be moved now."""
        self._waiting.advance()

    def settle(self, seconds: float) -> None:
        """Move what is under way for so long at most. RuntimeError where something then still is, saying what."""
        end = time.monotonic() + seconds
        while self.moving and time.monotonic() < end:
            self.advance()
            time.sleep(1e-4)
        if self.moving:
            waits = "; ".join(f"for {each} its message" for each in self._waiting.moving)
            raise RuntimeError(f"the function has returned while rank {self.rank} waits {waits}: wait() for "
                               "each handle")

    def isend(self, x: torch.Tensor, dst: int, text: str) -> Pending:
        """Begin to send `x`. Its `wait()` returns when the receiver has taken all of it."""
        return self._outgoing[dst].start(x, text)

    def irecv(self, x: torch.Tensor, src: int, text: str) -> Pending:
        """Begin to receive into `x`. Messages of a pair arrive in the order sent."""
        return self._incoming[src].start(x, text)

    def all_reduce(self, x: torch.Tensor, combine: Combine, ranks: Sequence[int], text: str) -> int:
        """Combine `x` over the ranks, in place, by combine(into, other), in which a + b must be b + a."""
        return self._direct.all_reduce(x, combine, tuple(ranks), text)

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, combine: Combine, ranks: Sequence[int],
                       text: str) -> int:
        """Combine `x` over the ranks; the i-th of them gets the i-th part of it, as long as `out`, in `out`."""
        return self._direct.reduce_scatter(out, x, combine, tuple(ranks), text)

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, ranks: Sequence[int], text: str) -> int:
        """Join the ranks' `x`, in their order, in `out`."""
        return self._direct.all_gather(out, x, tuple(ranks), text)

    def broadcast(self, x: torch.Tensor, src: int, ranks: Sequence[int], text: str) -> int:
        """Overwrite `x` with that of `src`."""
        return self._direct.broadcast(x, src, tuple(ranks), text)

    def barrier(self, ranks: Sequence[int], text: str) -> int:
        """Wait until all the ranks are here."""
        return self._direct.barrier(tuple(ranks), text)
