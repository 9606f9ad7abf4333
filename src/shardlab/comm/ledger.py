"""The ledger: every collective of a rank, with the bytes handed to it and the bytes it sends.

`payload` is what was handed to the verb, always counted. `wire` is what this rank sends for it: counted message by
message where it is made of messages, and in shared memory; for an operation of the backend, which does not tell, it is
derived from the ring algorithm and marked so.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from . import flight
from .trace import chrome_trace


@dataclass(slots=True)
class Message:
    """A message that was sent within a collective; ranks are global, times seconds on the host's monotonic clock."""

    src: int
    dst: int
    nbytes: int
    offset: int  # of its first byte in the collective's tensor; -1 where it is a sum that stands elsewhere
    link: str  # of the topology, "" where there is none
    start: float
    end: float = 0.0


@dataclass(slots=True)
class Entry:
    """One collective of one rank. Times are seconds on the host's monotonic clock; bytes are bytes."""

    op: str
    axis: str
    ranks: tuple[int, ...]
    rank: int
    shape: tuple[int, ...]
    dtype: str
    payload: int
    wire: float
    derived: bool
    phase: str  # "forward", "backward" inside autograd's backward pass (recomputation there included), or as named
    site: str
    start: float
    end: float = 0.0
    algorithm: str = ""  # "ring", "tree", …; "shared" in memory that all ranks share; "" is the backend's own
    transport: str = ""  # "gloo", "nccl", "shm", or "gloo+shm" across nodes and inside them
    staged: bool = False  # a device's tensor, copied to host memory and back since the transport takes no other
    messages: list[Message] = field(default_factory=list)  # those that this rank has sent, where it is made of messages


@dataclass
class Ledger:
    """A list of entries that sums and prints itself. Plain data: it can be returned from a rank, and merged."""

    entries: list[Entry] = field(default_factory=list)

    @classmethod
    def merge(cls, ledgers: Iterable[Ledger]) -> Ledger:
        """One ledger of all ranks, in the order of their starts."""
        return cls(sorted((e for ledger in ledgers for e in ledger.entries), key=lambda e: e.start))

    def where(self, keep: Callable[[Entry], bool] | None = None, /, **equal) -> Ledger:
        """The entries whose fields equal the given ones (`op="all_reduce", rank=0`) and for which `keep` is true."""
        return Ledger([e for e in self.entries
                       if all(getattr(e, k) == v for k, v in equal.items()) and (keep is None or keep(e))])

    @property
    def payload(self) -> int:
        """Bytes handed to the verbs, summed over all entries."""
        return sum(e.payload for e in self.entries)

    @property
    def wire(self) -> float:
        """Bytes sent, summed over all entries (derived ones included)."""
        return sum(e.wire for e in self.entries)

    def sums(self) -> dict[tuple[str, str, str], tuple[int, int, float]]:
        """{(axis, op, phase): (calls, payload bytes, wire bytes)}, in order of first use."""
        out: dict[tuple[str, str, str], tuple[int, int, float]] = {}
        for e in self.entries:
            calls, payload, wire = out.get((e.axis, e.op, e.phase), (0, 0, 0.0))
            out[e.axis, e.op, e.phase] = (calls + 1, payload + e.payload, wire + e.wire)
        return out

    def to_dicts(self) -> list[dict]:
        """The entries as plain dictionaries (JSON-ready), which is what drawings take."""
        return [asdict(e) for e in self.entries]

    def to_chrome_trace(self) -> str:
        """The entries and their messages as JSON that Perfetto (ui.perfetto.dev) and chrome://tracing open."""
        return chrome_trace(self.to_dicts())

    def _groups(self) -> Iterator[tuple[list[int], dict]]:
        """Ranks that did the same, with their sums: usually one group of all ranks."""
        rest = {r: self.where(rank=r).sums() for r in sorted({e.rank for e in self.entries})}
        while rest:
            sums = next(iter(rest.values()))
            same = [r for r, s in rest.items() if s == sums]
            yield same, sums
            rest = {r: s for r, s in rest.items() if r not in same}

    def table(self) -> list[tuple[str, ...]]:
        """Rows of text: ranks, axis, op, phase, calls, payload B, wire B; first the headings. Bytes are of one rank."""
        mark = "*" if any(e.derived for e in self.entries) else ""
        rows: list[tuple[str, ...]] = [("rank", "axis", "op", "phase", "calls", "payload B",
                                       f"wire B{mark}")]
        for ranks, sums in self._groups():
            who = _span(ranks)
            for (axis, op, phase), (calls, payload, wire) in sums.items():
                rows.append((who, axis, op, phase, f"{calls:,}", f"{payload:,}", f"{wire:,.0f}{mark}"))
        return rows

    def __str__(self) -> str:
        rows = self.table()
        width = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(c.rjust(w) if i > 3 else c.ljust(w) for i, (c, w) in enumerate(zip(row, width, strict=True)))
                 for row in rows]
        return "\n".join([*lines, *self._footnote()])

    def _repr_html_(self) -> str:
        head, *rows = self.table()
        cells = "".join("<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>" for row in rows)
        note = "".join(f"<caption style='caption-side:bottom'>{line}</caption>" for line in self._footnote())
        heads = "".join(f"<th>{c}</th>" for c in head)
        return f"<table>{note}<thead><tr>{heads}</tr></thead><tbody>{cells}</tbody></table>"

    def _footnote(self) -> list[str]:
        derived = any(e.derived for e in self.entries)
        return ["bytes are of each rank" + ("; * derived: what a ring would send" if derived else "")]


def _span(ranks: list[int]) -> str:
    if len(ranks) > 1 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}–{ranks[-1]}"
    return ", ".join(map(str, ranks))


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


def ring_wire(op: str, payload: int, p: int) -> float:
    """Bytes each of `p` ranks sends when a ring does `op` on `payload` bytes handed in (mean over ranks).

    Patarasuk & Yuan 2009 for the all-reduce; its two halves, all-gather and reduce-scatter, by the same argument.
    Broadcast and reduction passed along a chain are sent by all ranks but one. Of what all-to-all, gather and scatter
    are handed, all but a rank's own part is sent.
    """
    share = {"all_reduce": 2 * (p - 1) / p, "all_gather": p - 1, "barrier": 0, "send": 1, "recv": 0}
    return share.get(op, (p - 1) / p) * payload


def axis_of(group: dist.ProcessGroup) -> str:
    """The mesh axis that `group` lies along ("tp"), or "world" for the group of all ranks."""
    name = group.group_desc
    return name.removeprefix("mesh_") if name.startswith("mesh_") else "world" if name == "default_pg" else name


class Mark:
    """One collective in progress: tells the flight recorder and, where a ledger is open, writes its entry.

    `handed` is the tensor that the caller hands in, None where there is none; `alike` is false where the ranks' shapes
    may differ. `text` says what this rank is about to do, `agreed` the part of it that is the same on all ranks.
    """

    def __init__(self, op: str, handed: torch.Tensor | None, group: dist.ProcessGroup, detail: str = "",
                 alike: bool = True):
        self.ranks, self.axis, rank, _, where = members(group)
        shape = tuple(handed.shape) if handed is not None else ()
        dtype = name_of(handed.dtype) if handed is not None else ""
        self.text = f"{op}{detail} {dtype} {shape} {where}" if dtype else f"{op}{detail} {where}"
        self.agreed = self.text if alike else f"{op}{detail} {where}"
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


class Members(NamedTuple):
    """What is asked of a group at every call: its global ranks, its axis, this process's own global rank, and the
    backend for each type of device."""

    ranks: tuple[int, ...]
    axis: str
    rank: int
    backends: dict[str, str]
    where: str  # "on axis tp, ranks [0, 1]"


_known: WeakKeyDictionary[dist.ProcessGroup, Members] = WeakKeyDictionary()


def members(group: dist.ProcessGroup) -> Members:
    """Who is in the group, looked up once: torch takes several microseconds."""
    try:
        return _known[group]
    except KeyError:
        ranks, axis = dist.get_process_group_ranks(group), axis_of(group)
        backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
        _known[group] = Members(tuple(ranks), axis, dist.get_rank(), backends, f"on axis {axis}, ranks {ranks}")
        return _known[group]


@cache
def name_of(dtype: torch.dtype) -> str:
    """ "float32" of torch.float32."""
    return str(dtype).removeprefix("torch.")


_HERE, _TORCH = os.path.dirname(__file__), os.path.dirname(torch.__file__)


def _site() -> str:
    """file:line of the nearest caller outside `comm` and torch: the line of a cut, or of the backward call."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_HERE, _TORCH)):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition(os.sep)[2]}:{frame.f_lineno}"
