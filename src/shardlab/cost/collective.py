"""One line of a traffic bill: so many equal calls of a collective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from .comm import hops, serial_bytes

Phase = Literal["start", "forward", "backward", "finish", "clip", "step", "balance"]
PHASES = ("start", "forward", "backward", "finish", "clip", "step", "balance")


@dataclass(frozen=True)
class Collective:
    """`count` equal calls of `op` over `ranks` ranks of the mesh's `axis`; `payload` is bytes of one call on one rank.

    `own` is what of the payload stays on the rank, of an all-to-all.
    Phase "start" is before the first step (`data.replicate`), "finish" after backward (`grads.finish`), "clip" the norm
    of the gradients, "step" behind the optimizer's step (ZeRO-1 and 2 gather the new weights), "balance" how many
    tokens each expert got, which the training loop counts.
    """

    axis: str
    op: str
    phase: Phase
    what: str
    count: int
    payload: int
    ranks: int
    derivation: str
    own: int = 0

    @property
    def wire(self) -> float:
        """Bytes that a rank sends for one call if a ring does it, or a broadcast goes down a tree: derived, not
        counted; the mean over ranks, where they send differently. Of a single message, what its sender sends."""
        if self.op in ("send", "recv"):
            return self.payload if self.op == "send" else 0
        if self.op == "all_to_all":
            return self.payload - self.own
        if self.op == "broadcast":  # each rank but the root gets it once
            return (self.ranks - 1) / self.ranks * self.payload
        return serial_bytes(self.op, "ring", self.payload, self.ranks)

    @property
    def hops(self) -> int:
        """Messages that follow one another in one call, in a ring; a broadcast's go down a tree. A single message is
        its sender's."""
        if self.op in ("send", "recv"):
            return int(self.op == "send")
        if self.op == "all_to_all":
            return hops(self.op, "pairwise", self.ranks)
        return hops(self.op, "tree" if self.op == "broadcast" else "ring", self.ranks)


def alike(axis: str, op: str, phase: Phase, what: str, sizes: Iterable[int], width: int, ranks: int, times: int = 1
          ) -> Iterator[Collective]:
    """A call for each of these sizes, in numbers `width` bytes wide, `times` over: equal ones in one line."""
    for numbers, count in Counter(sizes).items():
        yield Collective(axis, op, phase, what, count * times, numbers * width, ranks, f"{numbers:,} × {width} B")
