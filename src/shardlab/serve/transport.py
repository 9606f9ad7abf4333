"""What of a cache goes where: what a transfer's two sides have to know of each other.

The two sides may be cut differently, and their block tables always differ. A message names what it carries by the
model's own numbers, layer, KV heads, tokens, and where the target wants it, so that neither side has to know how the
other is cut. Of ranks that hold the same heads the first sends them (`outbox`). A transfer ends with a seal from each
of the source's ranks, that says how many messages there were: what is missing then, has come twice, or is not what was
sent, makes it fail (`inbox`). One that is given up ends with a cancel in its place, behind which nothing of it comes.

Nothing is sent that the target has no blocks for: they are reserved before (`handovers`), so that a receiver writes
what comes where it belongs, keeps nothing back, and a sender that is too fast waits in its own queue.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..comm.channel import raw
from .events import Stream
from .pages import KVLayout, heads_of


@dataclass(frozen=True)
class Order:
    """Tokens `start` to `stop` of a transfer, as its source is told to send them: a `Stream` that can travel.

    `serial` is the transfer's, `number` its request's; `taken` and `given` are the block tables of source and target,
    which had the first `had` of all `tokens`.
    """

    serial: int
    number: int
    target: str
    had: int
    tokens: int
    taken: list[int]
    given: list[int]
    start: int
    stop: int
    last: bool

    @classmethod
    def of(cls, serial: int, stream: Stream) -> Order:
        transfer = stream.transfer
        return cls(serial, transfer.number, transfer.target.name, transfer.had, transfer.tokens, transfer.taken,
                   transfer.given, stream.start, stream.stop, stream.last)


@dataclass(frozen=True)
class Held:
    """What a rank tells of itself before anything is sent: whose model, what its blocks hold, and where it is."""

    spec: str
    layout: KVLayout

    def told(self) -> dict[str, Any]:
        layout = asdict(self.layout)
        return {"spec": self.spec, "layout": layout | {name: [layout[name].start, layout[name].stop]
                                                       for name in ("layers", "heads")}}

    @classmethod
    def heard(cls, told: dict[str, Any]) -> Held:
        layout = told["layout"]
        return cls(told["spec"], KVLayout(**layout | {name: range(*layout[name]) for name in ("layers", "heads")}))

    def unlike(self, other: Held) -> str:
        """Why what this rank holds can't be sent to the other; "" where it can."""
        if self.spec != other.spec:
            return f"one serves {self.spec}, the other {other.spec}"
        ours, theirs = self.layout, other.layout
        for name, what in (("dtype", "numbers of"), ("total_heads", "KV heads:"), ("key", "numbers a key:"),
                           ("value", "numbers a value:")):
            if getattr(ours, name) != getattr(theirs, name):
                return (f"one has {what} {getattr(ours, name)}, the other {getattr(theirs, name)}: caches are moved "
                        "as they are, give both sides the same")
        return ""


def sends(layout: KVLayout, rank: int, p: int) -> range:
    """Which of its heads rank `rank` of a tensor axis of `p` sends: of those with the same ones, the first all."""
    others = rank > 0 and heads_of(rank - 1, p, layout.total_heads) == layout.heads
    return range(0) if others else layout.heads


def overlap(a: range, b: range) -> range:
    """What two ranges have in common."""
    return range(max(a.start, b.start), max(max(a.start, b.start), min(a.stop, b.stop)))


def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """CRC-32 of the bytes of all of them."""
    crc = 0
    for x in tensors:
        crc = zlib.crc32(raw(x.contiguous()), crc)
    return crc


def slots(blocks: list[int], start: int, stop: int, size: int, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The block and the place in it of each of the tokens `start` to `stop`, of a table that begins with block number
    `first` of the sequence."""
    at = torch.arange(start, stop)
    return torch.tensor(blocks, dtype=torch.long)[at // size - first], at % size
