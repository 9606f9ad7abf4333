"""One message from rank to rank: by the backend or through shared memory, at the speed of its link.

A message is framed where the receiver has to know more than its bytes: in debug mode what the sender says it is, on an
emulated link when it is due. The frame goes before the bytes, in one message with them, is not counted, and costs a
copy on both sides. In debug mode the receiver has room for more than it expects, since gloo ends a process that has too
little.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.distributed as dist

from . import headroom, links, shm
from .disagreement import of_message

if TYPE_CHECKING:
    from .mark import Mark
    from .settings import Settings

FRAME = 512  # bytes
SPARE = 2**20  # bytes that may come beyond twice what is expected
HEAD = struct.Struct("<dqH")  # due, in seconds of the host's monotonic clock; bytes of the message; length of the text


class Part(NamedTuple):
    """One end of a message. `kind` is "isend" or "irecv", `x` flat and contiguous, `peer` a global rank; `text` says
    what is meant, alike on both ends; `offset` is where the bytes stand in the collective's tensor, −1 if nowhere."""

    kind: str
    x: torch.Tensor
    peer: int
    text: str
    offset: int = -1


class Pending(Protocol):
    """A message under way: `wait` returns when it has been taken, or has come; its tensor is left alone until then."""

    def wait(self) -> object: ...


class _Then:
    """Pending works, and what is to be done when they are over."""

    def __init__(self, works: list, then: Callable[[], None]):
        self._works, self._then = works, then

    def wait(self) -> None:
        for work in self._works:
            shm.meanwhile(work.wait) if isinstance(work, dist.Work) else work.wait()
        self._then()


def start(parts: list[Part], group: dist.ProcessGroup, settings: Settings, marks: list[Mark],
          tag: int) -> list[Pending]:
    """Start all the parts, which may depend on one another; a pending message for each, entered under its mark.

    Messages of one `tag` are in order. Of another are those within a collective, so that a single one may be under way
    meanwhile (over gloo; NCCL has no tags, shared memory one order for all).
    """
    started: list[Pending] = []
    by_backend: list[tuple[dist.P2POp, list]] = []
    for part, mark in zip(parts, marks, strict=True):
        sends, here = part.kind == "isend", dist.get_rank()
        src, dst = (here, part.peer) if sends else (part.peer, here)
        link = settings.topology.link(src, dst) if settings.topology else None
        x = part.x.view(torch.uint8)  # every dtype travels as bytes
        then = mark.sends(dst, x.nbytes, part.offset, link.name if link else "") if sends else _nothing
        works: list = []
        if in_memory(src, dst, settings):
            if settings.debug and sends:
                then = _if_unchanged(part, x.clone(), x, src, dst, then)
            works.append((shm.here().isend if sends else shm.here().irecv)(x, part.peer, part.text))
        else:
            if settings.debug or link:
                frame = _framed if sends else _unframed
                x, then = frame(part, x, src, dst, settings, then)
            by_backend.append((dist.P2POp(getattr(dist, part.kind), x, part.peer, group, tag), works))
        started.append(_Then(works, then))
    if by_backend:
        headroom.ask(marks[0].text)
    if any(op.tensor.is_cuda for op, _ in by_backend):  # NCCL would do them one after the other
        all_works = dist.batch_isend_irecv([op for op, _ in by_backend])
        for _, works in by_backend:
            works.extend(all_works)
    else:
        # receives first: gloo's word that one is ready would wait behind the bytes that this rank sends the same way
        for op, works in sorted(by_backend, key=lambda each: each[0].op is dist.isend):
            works.append(op.op(op.tensor, op.peer, op.group, op.tag))
    return started


def in_memory(a: int, b: int, settings: Settings) -> bool:
    """Whether messages between global ranks `a` and `b` go through shared memory: on one node, where asked for."""
    return settings.transport == "shm" and (settings.topology is None or
                                            settings.topology.node(a) == settings.topology.node(b))


def _nothing() -> None:
    pass


def _framed(part: Part, x: torch.Tensor, src: int, dst: int, settings: Settings, then: Callable[[], None]):
    """The bytes behind a frame; when sent, wait until the emulated link would have taken them."""
    left, due = links.book(settings.topology, src, dst, x.nbytes)
    text = part.text.encode()[: FRAME - HEAD.size]
    framed = torch.empty(FRAME + len(x), dtype=torch.uint8)
    framed[: HEAD.size + len(text)] = torch.frombuffer(bytearray(HEAD.pack(due, len(x), len(text)) + text),
                                                       dtype=torch.uint8)
    framed[FRAME:] = x

    if settings.debug:
        then = _if_unchanged(part, framed[FRAME:], x, src, dst, then)

    def finish() -> None:
        links.sleep_until(left)
        then()

    return framed, finish


def _if_unchanged(part: Part, before: torch.Tensor, x: torch.Tensor, src: int, dst: int, then: Callable[[], None]):
    def finish() -> None:
        if not torch.equal(before, x):
            raise ValueError(f"what rank {src} sends to rank {dst}, {part.text}, was changed before its wait(): "
                             "without debug mode the changed values may arrive")
        then()

    return finish


def _unframed(part: Part, x: torch.Tensor, src: int, dst: int, settings: Settings, then: Callable[[], None]):
    """Room for a framed message; when it has come, check it, wait until it is due, and fill `x`."""
    framed = torch.empty(FRAME + len(x) + (len(x) + SPARE if settings.debug else 0), dtype=torch.uint8)

    def finish() -> None:
        frame = framed[:FRAME].numpy().tobytes()
        due, nbytes, length = HEAD.unpack_from(frame)
        sent = frame[HEAD.size : HEAD.size + length].decode(errors="replace")
        if text := of_message(src, dst, (sent, nbytes), (part.text, len(x))):
            raise ValueError(text)
        links.sleep_until(due)
        x.copy_(framed[FRAME : FRAME + len(x)])
        then()

    return framed, finish
