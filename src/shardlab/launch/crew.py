"""The starting process's side: the server that it asks for ranks, and a crew of ranks from start to end."""

from __future__ import annotations

import atexit
import linecache
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from multiprocessing.connection import Pipe, wait
from pathlib import Path

from ..specs import Topology
from .failure import Failure
from .rank import Setup, kill
from .report import Output, Report

START_LIMIT = 120.0  # seconds until all ranks are in their process group; the first start imports torch
GRACE = 1.0  # seconds for which a lost connection waits for the failure that caused it
TICK = 0.1  # seconds between two looks at what the ranks print; for which a failure waits for others of its kind
ALONE = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")  # fork wants one thread
SIGNAL_HINTS = {"SIGKILL": "; the system does this when memory runs out",
                "SIGABRT": "; gloo does this when ranks disagree on a dtype or a size, and code that is not "
                           "Python where memory, or a card, runs out"}


class Server:
    """The process that forks ranks: started when first asked, again if it has died, ended with this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._owner = 0

    def request(self, descriptors: list[int]) -> None:
        """Have a warden forked that holds these file descriptors: its own pipe, then one for each rank."""
        with self._lock:
            if self._owner != os.getpid() or self._process is None or self._process.poll() is not None:
                self._start()
            socket.send_fds(self._socket, [b"+"], descriptors)

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        code = f"import sys; sys.path[:] = {[*map(str, sys.path)]!r}; from shardlab.launch import rank; rank.server()"
        with theirs:  # a session of its own: Ctrl-C is for the starting process, which then ends the ranks
            self._process = subprocess.Popen([sys.executable, "-c", code], stdin=theirs.fileno(),
                                             stdout=subprocess.DEVNULL, env=environ() | ALONE, start_new_session=True)
        self._owner = os.getpid()
        atexit.register(self._stop, self._process, self._socket, self._owner)

    @staticmethod
    def _stop(process: subprocess.Popen, requests: socket.socket, owner: int) -> None:
        if owner == os.getpid():
            requests.close()
            process.wait()


class Crew:
    """Ranks that live in one process group, from their start to their end, which is the end of them all."""

    def __init__(self, server: Server, size: int, backend: str, timeout: float, threads: int, card: int | None,
                 topology: Topology | None):
        folder = Path(tempfile.mkdtemp(prefix="shardlab-"))
        with ExitStack() as undo:  # should it fail before there are ranks: out of file descriptors, say
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
            self.setup = Setup(folder, size, backend, timeout + 30, threads, environ(), list(sys.path), os.getcwd(),
                               card, topology)
            self._output = Output(self.setup)
            undo.callback(self._output.close)
            self._control, warden = Pipe()
            self._pipes, ends = map(list, zip(*(Pipe() for _ in range(size)), strict=True))
            undo.pop_all()
        self._pids: list[int] = []
        try:
            with ExitStack() as handed_over:  # closed here, so that the end of a process is the end of its pipe
                server.request([handed_over.enter_context(end).fileno() for end in (warden, *ends)])
            self._control.send(self.setup)
            pids, missing = zip(*(body.decode().split(" ", 1) for body in self._collect(START_LIMIT)), strict=True)
            self._pids = [int(pid) for pid in pids]
            self.no_card: str = next(filter(None, missing), "")  # why a rank has none where it should have one
        except BaseException:
            self.end()
            raise

    def run(self, payload: bytes, timeout: float) -> list[bytes]:
        """Send the pickled call to all ranks; their pickled results in rank order. Raises RankError when one fails."""
        sources = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
        for pipe in self._pipes:  # `sources`: notebook cells, which have no file, for the lines of a traceback
            with suppress(OSError):  # a rank that has died meanwhile is about to be reported
                pipe.send(sources)
                pipe.send_bytes(payload)
        return self._collect(timeout)

    def end(self) -> None:
        """Kill the ranks, wait until they are gone, show what they still had to say, remove their folder."""
        if self._control.closed:
            return
        with suppress(EOFError, OSError):
            self._control.send("end")
            while self._control.poll(START_LIMIT):
                self._control.recv()
        shutil.rmtree(self.setup.folder, ignore_errors=True)  # done already, unless the warden was killed
        for end in (self._control, *self._pipes):
            end.close()
        self._output.close()

    def _collect(self, limit: float) -> list[bytes]:
        """What each rank sends back, in rank order. Raises RankError on the first failure, or at `limit` seconds."""
        report = Report(self.setup, self._pids)
        deadline = time.monotonic() + limit
        while report.late and (left := deadline - time.monotonic()) > 0:
            self._receive(report, min(left, TICK))
            self._output.show(report.bodies)
            for failure in report.failures.values():
                deadline = min(deadline, failure.when + (GRACE if failure.consequence else TICK))
        if report.failures:
            raise report.failed()
        if report.late:
            raise report.timed_out(limit)
        return [report.bodies[rank] for rank in range(self.setup.size)]

    def _receive(self, report: Report, patience: float) -> None:
        """Take in what arrives within `patience` seconds."""
        pending = {self._pipes[rank]: rank for rank in report.late}
        ready = wait([self._control, *pending], patience)
        for pipe in pending.keys() & ready:
            with suppress(EOFError, OSError):  # it died: its warden says how
                if failure := pipe.recv():
                    report.failures[pending[pipe]] = failure
                else:
                    report.bodies[pending[pipe]] = pipe.recv_bytes()
        if self._control in ready:
            failure = self._death()
            report.failures.setdefault(failure.rank, failure)

    def _death(self) -> Failure:
        try:
            rank, when, code = self._control.recv()
        except (EOFError, OSError):
            for pid in self._pids:
                kill(pid)
            raise RuntimeError("the process that starts and ends the ranks has itself ended: see its message above, "
                               "if it left one; a further run starts a new one") from None
        if code >= 0:
            return Failure(rank, "exited", f"ended its process with exit code {code}", "", when)
        known = {s.value: s.name for s in signal.Signals}  # real-time signals have no names
        name = known.get(-code, f"signal {-code}")
        return Failure(rank, "exited", f"was killed by {name}{SIGNAL_HINTS.get(name, '')}", "", when)


def environ() -> dict[str, str]:
    """This process's environment, and what ranks want beside it, unless it is set there: the loopback as gloo's
    interface, for gloo would look up the host's name, which need not resolve; and large tensors in pages of 2 MiB where
    Linux has some for who asks, since new memory in pages of 4 KiB takes several times as long to be found and cleared
    as to be written (docs.kernel.org, Transparent Hugepage Support)."""
    ours = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo", "THP_MEM_ALLOC_ENABLE": "1"}
    return ours | os.environ
