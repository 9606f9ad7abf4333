"""Prediction beside count: the account of `cost.traffic` and the ledger of a run, row by row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

HEADS = ("op", "phase", "predicted calls", "counted", "predicted B", "counted", "")


@dataclass(frozen=True)
class Comparison:
    """Predicted and counted calls and payload bytes of each op and phase. Prints itself; true where all agree."""

    rows: list[tuple[str, str, int, int, int, int]]

    def __bool__(self) -> bool:
        return all(calls == seen and payload == moved for _, _, calls, seen, payload, moved in self.rows)

    def table(self) -> list[tuple[str, ...]]:
        """The rows as text, with a verdict at the end of each."""
        return [(op, phase, f"{calls:,}", f"{seen:,}", f"{payload:,}", f"{moved:,}",
                 "equal" if calls == seen and payload == moved else "differs")
                for op, phase, calls, seen, payload, moved in self.rows]

    def __str__(self) -> str:
        rows = [HEADS, *self.table()]
        width = [max(len(row[i]) for row in rows) for i in range(len(HEADS))]
        return "\n".join("  ".join(c.rjust(w) if 1 < i < 6 else c.ljust(w)
                                   for i, (c, w) in enumerate(zip(row, width, strict=True))).rstrip() for row in rows)

    def _repr_html_(self) -> str:
        heads = "".join(f"<th>{h}</th>" for h in HEADS)
        cells = "".join("<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>" for row in self.table())
        return f"<table><thead><tr>{heads}</tr></thead><tbody>{cells}</tbody></table>"


def compare(predicted: Iterable[dict], counted: Sequence[dict]) -> Comparison:
    """Hold a traffic bill (`bill.to_dict()["collectives"]`) against one rank's ledger (`ledger.to_dicts()`).

    Raises ValueError where the ledger holds more than one rank: their bytes would add up to p times the bill.
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
    return Comparison([(op, phase, a, b, c, d) for (op, phase), (a, b, c, d) in rows.items()])
