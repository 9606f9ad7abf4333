"""How a rank failed, put in words where it failed."""

from __future__ import annotations

import os
import re
import time
import traceback
from dataclasses import dataclass

HERE = os.path.dirname(__file__) + os.sep


@dataclass(frozen=True)
class Failure:
    """How a rank failed: `kind` 'raised' or 'exited', a line, its traceback, and when by the host's monotonic clock."""

    rank: int
    kind: str
    line: str
    traceback: str
    when: float
    consequence: bool = False  # a lost connection: most likely another rank failed first

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """What `rank` has raised, as it is being caught."""
        if isinstance(error, SystemExit):
            return cls(rank, "exited", f"called sys.exit({_words(error)})", _shown(error), time.monotonic())
        line = f"raised {type(error).__qualname__}: {_words(error)}".splitlines()[0].rstrip(": ")
        return cls(rank, "raised", line, _shown(error), time.monotonic(), _lost_connection(line))


def _words(error: BaseException) -> str:
    """What the error says of itself, or that it can't."""
    try:
        return repr(error.code) if isinstance(error, SystemExit) else str(error)
    except Exception as worse:
        return f"(its own text raises {type(worse).__qualname__})"


def _shown(error: BaseException) -> str:
    """The traceback from the reader's own function on; empty if the error is ours."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(HERE):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames)) if frames else ""


def _lost_connection(line: str) -> bool:
    return re.search(r"connection (closed|reset)|broken pipe|by peer|remote process", line, re.IGNORECASE) is not None
