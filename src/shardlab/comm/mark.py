"""Marks: how a collective is told to the flight recorder while it runs, and entered in the ledgers that are open."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from . import flight
from .groups import members, name_of
from .ledger import Entry, Ledger, Message, Work

_open: list[Ledger] = []  # the ledgers being written: a stack, since `record` nests; of the process, which is the rank


@contextmanager
def record() -> Iterator[Ledger]:
    """Collect every collective of this rank, in any thread, until the block ends. Blocks nest; each gets its own."""
    ledger = Ledger()
    _open.append(ledger)
    try:
        yield ledger
    finally:
        # by identity: two ledgers with equal entries compare equal
        del _open[next(i for i, other in enumerate(_open) if other is ledger)]


_phases: list[str] = []  # the named phases that this rank is in, innermost last


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Enter collectives in the block under this phase, not under the forward or backward that autograd tells."""
    _phases.append(name)
    try:
        yield
    finally:
        _phases.pop()


@contextmanager
def work(kind: str, stage: int, microbatch: int) -> Iterator[None]:
    """Enter what the block computes, a pass of a pipeline's stage, in the ledgers that are open. (On a GPU it ends when
    the pass has been queued, not when it is done.)"""
    if not _open:
        yield
        return
    done = Work(kind, stage, microbatch, dist.get_rank(), time.monotonic())
    for ledger in _open:
        ledger.works.append(done)
    yield
    done.end = time.monotonic()


def outside(to: str, tensors: Sequence[torch.Tensor], nbytes: int) -> Callable[[], None]:
    """A message leaves the ranks of this launch, `to` whom the ledger calls its axis; to be called when it is gone. One
    without tensors is not entered."""
    if not (_open and tensors):
        return _nothing
    entry = Entry(op="send", axis=to, ranks=(), rank=dist.get_rank(), shape=tuple(tensors[0].shape),
                  dtype=name_of(tensors[0].dtype), payload=nbytes, wire=nbytes, derived=False,
                  phase=_phases[-1] if _phases else "forward", site=_site(), start=time.monotonic())
    for ledger in _open:
        ledger.entries.append(entry)

    def gone() -> None:
        entry.end = time.monotonic()

    return gone


def ring_wire(op: str, payload: int, p: int) -> float:
    """Bytes each of `p` ranks sends when a ring does `op` on `payload` bytes handed in (mean over ranks).

    Patarasuk & Yuan 2009 for the all-reduce; its two halves, all-gather and reduce-scatter, by the same argument.
    Broadcast and reduction passed along a chain are sent by all ranks but one. Of what all-to-all, gather and scatter
    are handed, all but a rank's own part is sent.
    """
    share = {"all_reduce": 2 * (p - 1) / p, "all_gather": p - 1, "barrier": 0, "send": 1, "recv": 0}
    return share.get(op, (p - 1) / p) * payload


class Mark:
    """One collective in progress: tells the flight recorder and, where a ledger is open, writes its entry.

    `handed` is the tensor that the caller hands in, None where there is none; `common` what those of all ranks have in
    common, where their shapes may differ. `text` says what this rank is about to do, `agreed` what all ranks are.
    """

    def __init__(self, op: str, handed: torch.Tensor | None, group: dist.ProcessGroup, detail: str = "",
                 common: str = ""):
        self.ranks, self.axis, rank, _, where, which = members(group)
        shape = tuple(handed.shape) if handed is not None else ()
        dtype = name_of(handed.dtype) if handed is not None else ""
        self.text = f"{op}{detail} {dtype} {shape} {where}" if dtype else f"{op}{detail} {where}"
        self.agreed = (f"{op}{detail} {common} {where}" if common else self.text) + which
        self.entry = None
        if _open:
            payload = handed.nbytes if handed is not None else 0
            told = "backward" if torch._C._current_graph_task_id() != -1 else "forward"
            self.entry = Entry(
                op=op, axis=self.axis, ranks=self.ranks, rank=rank, shape=shape, dtype=dtype,
                payload=payload, wire=0, derived=False, phase=_phases[-1] if _phases else told, site=_site(),
                start=time.monotonic())
            for ledger in _open:
                ledger.entries.append(self.entry)

    def enter(self) -> None:
        flight.enter(self.text)

    def goes(self, algorithm: str, transport: str, staged: bool) -> None:
        """Which way it goes; by the backend's own, what it sends is derived from a ring."""
        if self.entry is not None:
            self.entry.algorithm, self.entry.transport, self.entry.staged = algorithm, transport, staged
            if not algorithm and self.entry.op not in ("send", "recv", "barrier"):
                self.entry.wire = ring_wire(self.entry.op, self.entry.payload, len(self.ranks))
                self.entry.derived = True

    def sends(self, dst: int, nbytes: int, offset: int, link: str) -> Callable[[], None]:
        """A message leaves for global rank `dst`; to be called when it is gone."""
        if self.entry is None:
            return _nothing
        sent = Message(self.entry.rank, dst, nbytes, offset, link, time.monotonic())
        self.entry.messages.append(sent)
        self.entry.wire += nbytes

        def gone() -> None:
            sent.end = time.monotonic()

        return gone

    def writes(self, nbytes: int) -> None:
        """So many bytes went into shared memory."""
        if self.entry is not None:
            self.entry.wire += nbytes

    def drop(self) -> None:
        """It came to nothing, so nothing is entered."""
        flight.leave()
        for ledger in _open:
            ledger.entries[:] = [e for e in ledger.entries if e is not self.entry]

    def leave(self) -> None:
        flight.leave()
        if self.entry is not None:
            self.entry.end = time.monotonic()


def _nothing() -> None:
    pass


_HERE, _TORCH = os.path.dirname(__file__), os.path.dirname(torch.__file__)


def _site() -> str:
    """file:line of the nearest caller outside `comm` and torch: the line of a cut, or of the backward call."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_HERE, _TORCH)):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition(os.sep)[2]}:{frame.f_lineno}"
