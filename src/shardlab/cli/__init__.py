"""The command line: `shardlab plan MODEL --card h100`, `shardlab train --layout dp=2`, `shardlab bench links`."""

from __future__ import annotations

import io
import sys
from typing import NoReturn

import typer

from .bench import bench
from .doctor import doctor
from .plan import plan
from .serve_bench import serve_bench
from .train import train

app = typer.Typer(add_completion=False, rich_markup_mode=None)
app.command()(plan)
app.command()(train)
app.command("serve-bench")(serve_bench)
app.command()(doctor)
app.add_typer(bench, name="bench")


@app.callback()
def shardlab() -> None:
    """What a model needs, on which cards, before any of them is started; then its training, cut over ranks."""


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line. Wrong usage too is one line on stderr, and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows no × shows a ?, instead of failing
    try:
        sys.exit(app(arguments, standalone_mode=False))
    except Exception as error:
        if not hasattr(error, "format_message"):  # click's, which typer keeps in a place of its own
            raise
        print("shardlab:", error.format_message(), "(see --help)", file=sys.stderr)
        sys.exit(2)
