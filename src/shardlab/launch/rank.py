"""The processes behind `shardlab.launch`.

    notebook, script, test      asks the server for ranks; talks to each of them through a pipe of its own
      └─ server                 has torch loaded; forks a warden on request
           └─ warden            one for each set of ranks: forks them, says how they end, ends them all when told to,
                └─ ranks        or when the notebook is gone, kill -9 included

A fork of a process that has imported torch, but not used it, takes 10 ms and is safe: it has one thread. Python's own
`multiprocessing` forkserver works alike; it is not used because it runs a script's `__main__` again in every rank,
and because a rank that hangs in C code would outlive its notebook.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import linecache
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import cloudpickle
import torch
import torch.distributed as dist

from ..card import Limit
from ..comm import barrier, flight, links, shm, use
from ..specs import Topology
from .failure import Failure
from .send import name_of

MOST_RANKS = 200  # the pipes of all ranks travel in one message, which Linux limits to 253 file descriptors
IN_RANK = "SHARDLAB_RANK"  # in a rank's environment: its number
STACK_SIGNAL = signal.SIGUSR2  # makes a rank write where it is


@dataclass(frozen=True)
class Setup:
    """What all ranks of a set are told at their start; `timeout` in seconds, `card` in bytes; `topology` of the links
    that are to be slowed."""

    folder: Path
    size: int
    backend: str
    timeout: float
    threads: int
    environ: dict[str, str]
    path: list[str]
    directory: str
    card: int | None
    topology: Topology | None

    @property
    def nics(self) -> Path:
        """Where all ranks keep the clocks of emulated links."""
        return self.folder / "nics"

    def file(self, rank: int, kind: str) -> Path:
        """Where `rank` keeps its 'out' (what it prints), 'flight' (last collective) or 'stack' (where it is)."""
        return self.folder / f"{rank}.{kind}"


def server() -> None:
    """Fork a warden for every request that arrives on standard input, until nobody is left there to ask."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # wardens need no burial
    _freeze()
    with socket.socket(fileno=0) as requests:
        while True:
            message, descriptors, _, _ = socket.recv_fds(requests, 1, MOST_RANKS + 1)
            if not message:
                return
            _fork(_warden, requests, [Connection(fd) for fd in descriptors])
            _preload()  # after the first ranks, which need not wait for it


def _preload() -> None:
    """Import what the first optimizer of a rank would: a second and more, on each."""
    if "torch._dynamo" not in sys.modules:
        importlib.import_module("torch._dynamo")
        _freeze()


def _freeze() -> None:
    """Leave what there is out of collections: in a rank they would touch, and so copy, all of torch's pages."""
    gc.collect()
    gc.freeze()


def _fork(body: Callable, *args) -> int:
    """Run body(*args) in a forked process that ends with it; returns its id."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        body(*args)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # never back into the forking process's own loop


def _warden(requests: socket.socket, ends: list[Connection]) -> None:
    requests.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    control, *pipes = ends
    setup = control.recv()
    if not isinstance(setup, Setup):  # told to end before there was anything to start
        return
    if setup.card is not None:
        _preload()  # what a rank imports for itself counts against its card
    memory = shm.attempt(shm.Segment.anonymous, setup.size)
    alive: dict[int, int] = {}
    told = threading.Thread(target=_end_when_told, args=(control, alive))
    try:
        for rank, pipe in enumerate(pipes):
            pid = _fork(_rank, rank, pipe, [end for end in ends if end is not pipe], setup, memory)
            with suppress(OSError):
                os.setpgid(pid, pid)  # the rank does the same; who comes first does not matter
            alive[pid] = rank
        for pipe in pipes:
            pipe.close()
        told.start()
        while alive:
            pid, status = os.waitpid(-1, 0)
            rank = alive.pop(pid)
            kill(pid)  # what the rank itself has started: data loaders, say
            with suppress(OSError):  # nobody may be left to be told
                control.send((rank, time.monotonic(), os.waitstatus_to_exitcode(status)))
        told.join()  # the folder holds what the ranks have left behind to be read
    finally:
        for pid in alive:  # none, unless a fork has failed
            kill(pid)
        shutil.rmtree(setup.folder, ignore_errors=True)


def _end_when_told(control: Connection, alive: dict[int, int]) -> None:
    with suppress(EOFError, OSError):  # the notebook is gone
        control.recv()
    for pid in list(alive):
        kill(pid)


def kill(rank: int) -> None:
    """End the rank with this process id and what it has started: a rank leads a process group of its own."""
    with suppress(ProcessLookupError, PermissionError):  # gone already (macOS says PermissionError)
        os.killpg(rank, signal.SIGKILL)


def _rank(rank: int, pipe: Connection, others: list[Connection], setup: Setup,
          memory: tuple[shm.Segment | None, str]) -> None:
    os.setpgid(0, 0)
    for end in others:
        end.close()
    _settle(rank, setup)
    links.open(setup.nics)
    shm.join(rank, setup.timeout, *memory)
    limit = None if setup.card is None else Limit(setup.card, gpu="nccl" in setup.backend)
    _report(rank, pipe, partial(_join, rank, setup, limit))
    while True:
        try:
            sources, payload = pipe.recv(), pipe.recv_bytes()
        except EOFError:
            return
        linecache.cache.update(sources)
        flight.open(setup.file(rank, "flight"))
        _report(rank, pipe, partial(_call, payload, limit, setup.topology))


def _settle(rank: int, setup: Setup) -> None:
    """Make the forked process look like a fresh one that the notebook has started, printing into a file."""
    null = os.open(os.devnull, os.O_RDONLY)
    out = os.open(setup.file(rank, "out"), os.O_WRONLY | os.O_APPEND)
    for source, target in ((null, 0), (out, 1), (out, 2)):
        os.dup2(source, target)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore
    stack = setup.file(rank, "stack").open("w")
    faulthandler.enable(stack)  # an abort inside gloo leaves the Python line that led there
    faulthandler.register(STACK_SIGNAL, stack)
    os.environ.clear()
    os.environ.update(setup.environ | {IN_RANK: str(rank)})
    sys.path[:] = setup.path
    os.chdir(setup.directory)
    torch.set_num_threads(setup.threads)


def _join(rank: int, setup: Setup, limit: Limit | None) -> bytes:
    """Enter the process group of all ranks. They meet in a file, so no port is chosen that another might take.

    What comes back is this process's id, then why the rank has no card where it should have one.
    """
    device = torch.device("cuda", rank) if "nccl" in setup.backend else None
    if device is not None:
        torch.cuda.set_device(device)
    store = dist.FileStore(str(setup.folder / "store"), setup.size)
    dist.init_process_group(setup.backend, store=store, rank=rank, world_size=setup.size, device_id=device,
                            timeout=timedelta(seconds=setup.timeout))
    if limit is not None:
        limit.prepare()
        for _ in range(0 if device else 8):  # for gloo's threads to take what they need: a full card would refuse it,
            barrier()  # and the process end
    return f"{os.getpid()} {limit.missing if limit is not None else ''}".encode()


def _call(payload: bytes, limit: Limit | None, topology: Topology | None) -> bytes:
    fn, args, kwargs = cloudpickle.loads(payload)
    with limit or nullcontext(), use(topology=topology):
        result = fn(dist.group.WORLD, *args, **kwargs)
        shm.settle()
    try:
        return cloudpickle.dumps(result)
    except Exception as error:
        raise TypeError(f"{name_of(fn)} returned a {type(result).__qualname__}, which can't be sent back: {error}. "
                        "Return tensors, numbers, strings, or lists and dicts of them.") from None


def _report(rank: int, pipe: Connection, work: Callable[[], bytes]) -> None:
    """Do the work and send what it returned, or how it failed. The rank stays either way: its warden ends it."""
    body, failure = b"", None
    try:
        body = work()
    except BaseException as error:
        failure = Failure.of(rank, error)
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send(failure)
    if failure is None:
        pipe.send_bytes(body)
