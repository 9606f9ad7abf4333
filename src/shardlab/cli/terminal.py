"""What all commands print alike: tables without lines, and what is refused in one line."""

from __future__ import annotations

import sys
from typing import NoReturn

import typer
from rich.table import Table

FIGURES = ("a card holds", "GB", "GiB", "bytes", "measured", "fitted", "error", "a step", "MFU",
           "cards", "at once", "requests/s", "a card", "first token", "a further one")


def refuse(error: Exception) -> NoReturn:
    """One line on stderr that says what to change, and exit code 2."""
    text = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) else str(error)
    print("shardlab:", " ".join(text.split()), file=sys.stderr)
    raise typer.Exit(2)


def plain_table(*headings: str) -> Table:
    """A table without lines; figures are to the right and never broken."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in headings:
        figures = heading in FIGURES
        table.add_column(heading, justify="right" if figures else "left", no_wrap=figures, header_style="dim")
    return table
