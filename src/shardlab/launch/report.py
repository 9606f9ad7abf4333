"""What the ranks say: their prints, labelled and in rank order; a failure, with the failing rank's traceback first."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Container, Iterable
from contextlib import suppress
from pathlib import Path
from traceback import StackSummary

import torch

from ..comm import flight
from . import rank as rank_module
from .failure import Failure
from .rank import Setup

SENDING = "Each waits for another to receive: start both messages before either is waited for, comm.batch_isend_irecv."
HINT = "`with comm.use(debug=True):` around the collectives makes ranks that disagree on one say so."
NOT_OWN = ("<frozen", *(str(Path(file).parent) for file in (flight.__file__, rank_module.__file__, torch.__file__,
                                                            os.__file__)))
STACK_WAIT = 0.1  # seconds that a rank gets to write where it is


class RankError(RuntimeError):
    """A rank failed. `rank` says which, `traceback` is its own traceback as text; str() of the error shows both."""

    def __init__(self, message: str, rank: int, traceback: str = ""):
        super().__init__(message, rank, traceback)
        self.rank, self.traceback = rank, traceback

    def __str__(self) -> str:
        return self.args[0]

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of the launcher's own frames, which would hide the rank's."""
        return [f"{type(self).__name__}: {self}"]


class RankExited(RankError):
    """A rank's process ended before it returned: by sys.exit, by a crash, or killed."""


class RankTimeout(RankError):
    """The ranks did not return within the time limit. `rank` is the first that did not, `traceback` where it was."""


class Output:
    """What the ranks print, each into a file, passed on line by line with its rank's number in front."""

    def __init__(self, setup: Setup):
        self._files = [setup.file(rank, "out").open("w+b") for rank in range(setup.size)]
        self._rests = [b""] * setup.size

    def show(self, done: Container[int]) -> None:
        """Print what is new, in rank order: up to the first rank that is not done, of that one whole lines."""
        for rank in range(len(self._files)):
            self._show(rank, rank in done)
            if rank not in done:
                break
        sys.stdout.flush()

    def _show(self, rank: int, last: bool) -> None:
        *lines, rest = (self._rests[rank] + self._files[rank].read()).split(b"\n")
        if last and rest:
            lines, rest = [*lines, rest], b""
        self._rests[rank] = rest
        for line in lines:
            text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]  # a progress bar's last state
            sys.stdout.write(_writable(f"[rank {rank}] {text}\n"))

    def close(self) -> None:
        """Print all that is left."""
        self.show(range(len(self._files)))
        for file in self._files:
            file.close()


def _writable(text: str) -> str:
    """`text` as this process's output takes it: what its encoding lacks is escaped."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, errors="backslashreplace").decode(encoding)


class Report:
    """What has come in from the ranks of one run: `bodies`, the pickled results, and `failures`.

    `pids` are the ranks' process ids, [] while they are starting.
    """

    def __init__(self, setup: Setup, pids: list[int]):
        self.setup, self.pids = setup, pids
        self.bodies: dict[int, bytes] = {}
        self.failures: dict[int, Failure] = {}

    @property
    def late(self) -> list[int]:
        """The ranks that nothing has come from."""
        return [rank for rank in range(self.setup.size) if rank not in self.bodies and rank not in self.failures]

    def failed(self) -> RankError:
        """The error to raise: the failure that came first, a lost connection only if there is nothing else."""
        first = min(self.failures.values(), key=lambda failure: (failure.consequence, failure.when))
        first = next(self.failures[rank] for rank in sorted(self.failures) if self.failures[rank].line == first.line)
        kind = RankExited if first.kind == "exited" else RankError
        text = first.traceback or _formatted(self._stack(first.rank))
        table = self._table(rank for rank in range(self.setup.size) if rank != first.rank)
        parts = (f"rank {first.rank} of {self.setup.size} {first.line}", text.rstrip(), table)
        return kind("\n\n".join(filter(None, parts)), first.rank, text)

    def timed_out(self, limit: float) -> RankTimeout:
        """The error to raise when `limit` seconds are over."""
        doing = "return" if self.pids else "start"
        table = self._table(range(self.setup.size))
        first, many = self.late[0], len(self.late)
        head = f"{many} of {self.setup.size} ranks did not {doing} within {limit:g} s"
        last = [flight.read(self.setup.file(rank, "flight")) for rank in self.late]
        hint = SENDING if all(text.startswith("in send to") and ";" not in text for text in last) else HINT
        return RankTimeout(f"{head}\n\n{table}\n\n{hint}", first, _formatted(self._stack(first)))

    def _table(self, ranks: Iterable[int]) -> str:
        """A line for each of `ranks`: its state, the line it is at, its last collective and for how long."""
        ranks = list(ranks)
        self._ask_for_stacks()
        states = {rank: self._state(rank) for rank in ranks}
        width = max(map(len, states.values()), default=0)
        return "\n".join(f"rank {rank} │ {state:{width}} │ {flight.read(self.setup.file(rank, 'flight'))}"
                         for rank, state in states.items())

    def _state(self, rank: int) -> str:
        if rank in self.bodies:
            return "has returned"
        if rank in self.failures:
            failure = self.failures[rank]
            return "lost its connection" if failure.consequence else _short(failure.line)
        for frame in reversed(self._stack(rank)):
            if not frame.filename.startswith(NOT_OWN):
                return _short(f"{frame.name}, line {frame.lineno}: {frame.line or frame.filename}")
        return "is running" if self.pids else "is starting"

    def _ask_for_stacks(self) -> None:
        running = [self.pids[rank] for rank in self.late if self.pids]
        for pid in running:
            with suppress(ProcessLookupError):
                os.kill(pid, rank_module.STACK_SIGNAL)
        if running:
            time.sleep(STACK_WAIT)

    def _stack(self, rank: int) -> StackSummary:
        """Where the rank's function was when faulthandler last wrote it down, innermost last; empty if it did not."""
        file = self.setup.file(rank, "stack")
        threads = file.read_text(errors="replace").split("(most recent call first):") if file.exists() else []
        for thread in threads:
            inner, found, _ = thread.partition(f'  File "{rank_module.__file__}"')
            if found:
                frames = re.findall(r'File "(.*)", line (\d+) in (.*)', inner)
                return StackSummary.from_list([(name, int(line), function, None)
                                               for name, line, function in reversed(frames)])
        return StackSummary()


def _formatted(stack: StackSummary) -> str:
    return "Traceback (most recent call last):\n" + "".join(stack.format()) if stack else ""


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:59] + "…"
