"""The ledger: every collective of a rank, with the bytes handed to it and the bytes it sends.

`payload` is what was handed to the verb, always counted. `wire` is what this rank sends for it: counted message by
message where it is made of messages, and in shared memory; for an operation of the backend, which does not tell, it is
derived from the ring algorithm and marked so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field

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


@dataclass(slots=True)
class Work:
    """What a rank computed between its messages: a pass of a pipeline's stage. Times as an entry's."""

    kind: str  # "F", "B", "I" or "W", as in `schedule`
    stage: int
    microbatch: int
    rank: int
    start: float
    end: float = 0.0


@dataclass
class Ledger:
    """A list of entries that sums and prints itself. Plain data: it can be returned from a rank, and merged."""

    entries: list[Entry] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)

    @classmethod
    def merge(cls, ledgers: Iterable[Ledger]) -> Ledger:
        """One ledger of all ranks, in the order of their starts."""
        given = list(ledgers)
        return cls(sorted((e for ledger in given for e in ledger.entries), key=lambda e: e.start),
                   sorted((w for ledger in given for w in ledger.works), key=lambda w: w.start))

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

    def _groups(self) -> Iterator[tuple[list[int], list[tuple[Ledger, bool]]]]:
        """Ranks that did the same, usually all, with their calls: those derived apart from those counted."""
        parts = [(part, derived) for derived in (False, True) if (part := self.where(derived=derived)).entries]
        rest = {r: [(part.where(rank=r), derived) for part, derived in parts]
                for r in sorted({e.rank for e in self.entries})}
        while rest:
            mine = next(iter(rest.values()))
            same = [r for r, each in rest.items() if [p.sums() for p, _ in each] == [p.sums() for p, _ in mine]]
            yield same, mine
            rest = {r: each for r, each in rest.items() if r not in same}

    def table(self) -> list[tuple[str, ...]]:
        """Rows of text: ranks, axis, op, phase, calls, payload B, wire B; first the headings. Bytes are of one rank."""
        mark = "*" if any(e.derived for e in self.entries) else ""
        rows: list[tuple[str, ...]] = [("rank", "axis", "op", "phase", "calls", "payload B", f"wire B{mark}")]
        for ranks, parts in self._groups():
            for part, derived in parts:
                for (axis, op, phase), (calls, payload, wire) in part.sums().items():
                    rows.append((_span(ranks), axis, op, phase, f"{calls:,}", f"{payload:,}",
                                 f"{wire:,.0f}{'*' if derived else ''}"))
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
