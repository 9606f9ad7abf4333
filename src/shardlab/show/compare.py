"""Prediction beside count, row by row: what `cost` says, and the ledger of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

CALLS = ("op", "phase", "predicted calls", "counted", "predicted B", "counted", "")
WIRE = ("rank", "predicted messages", "counted", "predicted B", "counted", "")


@dataclass(frozen=True)
class Comparison:
    """Rows that end in two numbers, each predicted and then counted. Prints itself; true where all agree.

    `heads` are a row's headings, and one more for the verdict.
    """

    rows: list[tuple]
    heads: tuple[str, ...] = CALLS

    def __bool__(self) -> bool:
        return all(map(_agrees, self.rows))

    def table(self) -> list[tuple[str, ...]]:
        """The rows as text, with a verdict at the end of each."""
        return [(*map(str, row[:-4]), *(f"{n:,}" for n in row[-4:]), "equal" if _agrees(row) else "differs")
                for row in self.rows]

    def __str__(self) -> str:
        rows = [self.heads, *self.table()]
        last = len(self.heads) - 1
        width = [max(len(row[i]) for row in rows) for i in range(last + 1)]
        return "\n".join("  ".join(c.rjust(w) if last - 5 < i < last else c.ljust(w)
                                   for i, (c, w) in enumerate(zip(row, width, strict=True))).rstrip() for row in rows)

    def _repr_html_(self) -> str:
        heads = "".join(f"<th>{h}</th>" for h in self.heads)
        cells = "".join("<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>" for row in self.table())
        return f"<table><thead><tr>{heads}</tr></thead><tbody>{cells}</tbody></table>"


def _agrees(row: tuple) -> bool:
    return row[-4] == row[-3] and row[-2] == row[-1]


def compare(predicted: Iterable[dict], counted: Sequence[dict]) -> Comparison:
    """Hold a traffic bill (`bill.to_dict()["collectives"]`) against one rank's ledger (`ledger.to_dicts()`).

    The numbers are calls and payload bytes of each op and phase. Raises ValueError where the ledger holds more than one
    rank: their bytes would add up to p times the bill.
    """
    ranks = {e["rank"] for e in counted}
    if len(ranks) > 1:
        raise ValueError(f"the bill is of one rank and the ledger of ranks {sorted(ranks)}: pass one rank's entries")
    rows: dict[tuple[str, str], list[int]] = {}
    for row in predicted:
        mine = rows.setdefault((row["op"], row["phase"]), [0, 0, 0, 0])
        mine[0] += row["count"]
        mine[2] += row["count"] * row["payload"]
    for e in counted:
        mine = rows.setdefault((e["op"], e["phase"]), [0, 0, 0, 0])
        mine[1] += 1
        mine[3] += e["payload"]
    return Comparison([(op, phase, *numbers) for (op, phase), numbers in rows.items()])


def wire(predicted: Mapping[int, tuple[int, int]], counted: Sequence[dict]) -> Comparison:
    """Hold {rank: (messages, bytes)} that each sends, as `cost.comm` has them, against the ledgers of all ranks.

    `counted` are the entries of `Ledger.to_dicts()`; those of one rank are added up. Raises ValueError where the bytes
    of an entry are not counted but derived: those of the backend's own collectives are.
    """
    for e in counted:
        if e["derived"]:
            raise ValueError(f"the bytes of this {e['op']} are derived, not counted: the backend does not tell what it "
                             "sends. Record it made of messages, under comm.use(\"ring\")")
    rows = {rank: [messages, 0, nbytes, 0] for rank, (messages, nbytes) in predicted.items()}
    for e in counted:
        mine = rows.setdefault(e["rank"], [0, 0, 0, 0])
        mine[1] += len(e["messages"])
        mine[3] += e["wire"]
    return Comparison([(rank, *rows[rank]) for rank in sorted(rows)], WIRE)
