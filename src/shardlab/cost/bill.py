"""The form of a bill: rows that say what, how it comes about, and how much."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from ..specs import units


@dataclass(frozen=True)
class Row:
    """One line of a bill: `value` in `unit` ("B" for bytes), with its derivation in words and numbers.

    `note` is what the line has to add, a second quantity for one.
    """

    label: str
    derivation: str
    value: float
    unit: str = "B"
    note: str = ""

    def cells(self) -> tuple[str, str, str, str, str]:
        """Label, derivation, value, value in binary units (bytes only), note: as text."""
        if self.unit != "B":
            return self.label, self.derivation, f"{self.value:,} {self.unit}", "", self.note
        return self.label, self.derivation, units.decimal(self.value), units.binary(self.value), self.note


class Bill:
    """What every bill can do: print itself in a terminal, show itself in a notebook, turn into plain data.

    A bill gives `title`, `rows` and `footnotes`; `headings` stand over the five columns of a notebook's table.
    """

    headings = ("what", "how it comes about", "", "", "")

    @property
    def title(self) -> str:
        raise NotImplementedError

    @property
    def rows(self) -> list[Row]:
        raise NotImplementedError

    @property
    def footnotes(self) -> list[str]:
        return []

    def __str__(self) -> str:
        table = [row.cells() for row in self.rows]
        width = [max((len(cells[i]) for cells in table), default=0) for i in range(5)]
        lines = [f"{a:<{width[0]}}   {b:<{width[1]}}   {c:>{width[2]}}   {d:>{width[3]}}   {e}".rstrip()
                 for a, b, c, d, e in table]
        return "\n".join([self.title, *lines, *self.footnotes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def cell(text: str, right: bool) -> str:
            return f'<td style="text-align:{"right" if right else "left"}">{escape(text)}</td>'

        head = "".join(f'<th style="text-align:{"right" if i in (2, 3) else "left"}">{escape(text)}</th>'
                       for i, text in enumerate(self.headings))
        body = "".join(
            "<tr>" + "".join(cell(text, right=i in (2, 3)) for i, text in enumerate(row.cells())) + "</tr>"
            for row in self.rows)
        foot = "".join(f"<p>{escape(note)}</p>" for note in self.footnotes)
        return f'<table class="bill"><caption>{escape(self.title)}</caption><thead><tr>{head}</tr></thead>' \
               f'<tbody>{body}</tbody></table>{foot}'

    def to_dict(self) -> dict[str, Any]:
        """The bill as plain data: title, rows, footnotes."""
        return {"title": self.title, "rows": [asdict(row) for row in self.rows], "footnotes": self.footnotes}
