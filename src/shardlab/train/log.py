"""What a run has come to, step by step: one JSON object a line, written by one rank as the run goes on.

    {"step": 40, "loss": 2.31, "norm": 0.87, "tokens": 4096, "seconds": 0.52, "tokens_per_second": 7876.9,
     "memory": 412254208, "lr": 0.0009, "skew": 0.0}

Losses are in nats, `tokens` are labels of all ranks, `memory` is in bytes and of the rank that writes, see `memory`;
`lr` is that of the optimizer's first group, `skew` the load of the busiest expert ÷ the mean, 0 without experts. What
is not finite is null, which JSON has. `show.training` draws it.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from ..specs.units import binary

LONGEST = 4096  # bytes that a line stays below
KEYS = ("step", "loss", "norm", "tokens", "seconds", "tokens_per_second", "memory", "lr", "skew")


class Log:
    """The file at `path`, made with its folder by the first `write`. A run that begins at step s, since it is resumed
    or begun again, keeps the lines of earlier steps and drops those of s and after, which it is about to write."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._begun = False

    def write(self, record: dict[str, Any]) -> None:
        """Add a step's line, and have the system take it."""
        if not self._begun:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            kept = [each for each in read(self.path) if each["step"] < record["step"]] if self.path.exists() else []
            unfinished = self.path.with_name(self.path.name + ".unfinished")
            unfinished.write_text("".join(map(_line, kept)), encoding="utf-8")
            unfinished.replace(self.path)
            self._begun = True
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(record))


def read(path: str | Path) -> list[dict[str, Any]]:
    """The steps of a log, in order. A last line that was cut off, by the end of the process that wrote it, is left
    out. Raises ValueError on a file that is no log."""
    lines = Path(path).read_text(encoding="utf-8").split("\n")[:-1]
    try:
        records = [json.loads(line) for line in lines]
    except ValueError as error:
        raise ValueError(f"{path} is no log of a run: {error}") from None
    if wrong := [each for each in records if not isinstance(each, dict) or "step" not in each]:
        raise ValueError(f"{path} is no log of a run: {str(wrong[0])[:60]} has no step")
    return records


def last(path: str | Path) -> dict[str, Any] | None:
    """The last whole line of a log, without reading all of it; None where it has none yet."""
    with Path(path).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LONGEST))
        *lines, _ = file.read().split(b"\n")
    return json.loads(lines[-1]) if lines else None


def said(record: dict[str, Any]) -> str:
    """A step as a progress bar says it."""
    loss, norm = (math.nan if value is None else value for value in (record["loss"], record["norm"]))
    busiest = f", busiest expert {record['skew']:.2f} × mean" if record["skew"] else ""
    return (f"loss {loss:.4f}, norm {norm:.3g}, {record['tokens_per_second']:,.0f} tokens/s, "
            f"{binary(record['memory'], 3)} held{busiest}")


def _line(record: dict[str, Any]) -> str:
    finite = {name: None if isinstance(value, float) and not math.isfinite(value) else value
              for name, value in record.items()}
    return json.dumps(finite, allow_nan=False) + "\n"
