"""The two ways to have a function run on ranks: `launch`, and `ranks` that stay. See the package's docstring."""

from __future__ import annotations

import math
import os
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from .. import card as cards
from ..comm import shm, use
from ..specs import Topology
from ..specs.units import binary
from . import joined
from .crew import Crew, Server
from .rank import IN_RANK, MOST_RANKS
from .send import pack, unpack

_BACKENDS = ("auto", "gloo", "nccl")
_server = Server()  # this process's one server; nothing is started before the first ranks are


def launch(fn: Callable, ranks: int, *args, backend: str = "auto", timeout: float = 60, threads: int = 1,
           card: object = None, topology: Topology | None = None, **kwargs) -> list:
    """Run fn(group, *args, **kwargs) on `ranks` new processes; their results in rank order.

    `group` is the process group of all ranks. `backend`: 'gloo', 'nccl' (one GPU a rank), or 'auto': nccl for the
    tensors on GPUs where there is one for each rank, gloo for the others. `timeout` in seconds, for fn; `threads` of
    PyTorch in each rank. fn, its arguments and results travel by value (cloudpickle), so that functions and classes
    of a notebook or a test will do. What ranks print is printed here, labelled, in rank order.

    `card` limits what each rank may hold while fn runs: "256 MiB", bytes, or a `specs.CardSpec`. An allocation past it
    raises PyTorch's own error in that rank; not caught, it ends the run, and says what the rank held. With one GPU a
    rank the limit is the GPU's, else the process's, which only Linux has: elsewhere an `UnlimitedWarning` says so. See
    `shardlab.card`.

    `topology` places the ranks on nodes and makes the messages between them as slow as its links: every collective is
    then made of messages, as in `with comm.use(topology=…):`, which does the same for a part of fn.

    Raises ValueError or TypeError before anything starts (arguments, an fn that can't be sent); RankError when a rank
    raises, RankExited when one ends, RankTimeout at the time limit. Under torchrun, what fn raises.
    """
    with Ranks(ranks, backend, timeout, threads, card, topology) as pool:
        return pool.run(fn, *args, **kwargs)


def ranks(ranks: int, backend: str = "auto", timeout: float = 60, threads: int = 1, card: object = None,
          topology: Topology | None = None) -> Ranks:
    """Ranks that stay alive between calls: `with ranks(4) as r: r.run(fn, …)`; the arguments are those of `launch`.

    The tensors that a call leaves behind stay on the rank's `card`, as they would on a real one.
    """
    return Ranks(ranks, backend, timeout, threads, card, topology)


class Ranks:
    """A number of ranks that stay: started by the first run, ended by `close()`, by leaving `with`, or by a failure.

    After a failure the next run starts fresh ones.
    """

    def __init__(self, size: int, backend: str = "auto", timeout: float = 60, threads: int = 1, card: object = None,
                 topology: Topology | None = None):
        _check(size, backend, timeout, threads)
        _check_topology(size, topology)
        self.card = cards.budget(card)
        if not joined.launched():
            _check_host(size, backend)
        if self.card is not None and not _on_gpus(backend, size):
            cards.check_machine(self.card)
        self.size, self.backend, self.timeout, self.threads = size, backend, timeout, threads
        self.topology = topology
        self._crew: Crew | None = None
        self._closed = False
        self._one_at_a_time = threading.Lock()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def start(self) -> Path:
        """Start the ranks now, not with the first run. Comes back with a folder of theirs, for sockets say, which is
        removed when they end, however they or this process do. Raises RuntimeError under torchrun, which has its own.
        """
        if joined.launched():
            raise RuntimeError("torchrun has started the ranks: only those that are started here have a folder")
        with self._one_at_a_time:
            return self._started().setup.folder

    def run(self, fn: Callable, *args, **kwargs) -> list:
        """Run fn(group, *args, **kwargs) on every rank; the results in rank order. Raises as `launch` does.

        Called from several threads, one run waits for the other.
        """
        if not callable(fn):
            raise TypeError(f"fn must be a function to run on every rank, not {fn!r}: launch(fn, 4), r.run(fn)")
        if joined.launched():
            return self._run_in_torchrun(fn, args, kwargs)
        payload = pack(fn, args, kwargs)
        with self._one_at_a_time:
            bodies = self._bodies(payload)
        return [unpack(body, fn) for body in bodies]

    def _started(self) -> Crew:
        if self._closed:
            raise ValueError("these ranks are closed; make new ones with ranks(…)")
        if self._crew is None:
            self._crew = Crew(_server, self.size, _chosen(self.backend, self.size), self.timeout, self.threads,
                              self.card, self.topology)
            self._warn(self._crew.no_card)
        return self._crew

    def _bodies(self, payload: bytes) -> list[bytes]:
        try:
            return self._started().run(payload, self.timeout)
        except BaseException:  # Ctrl-C included
            self._end()
            raise

    def close(self) -> None:
        """End the ranks; returns when they are gone."""
        self._closed = True
        self._end()

    def _end(self) -> None:
        crew, self._crew = self._crew, None
        if crew is not None:
            crew.end()

    def _run_in_torchrun(self, fn: Callable, args: tuple, kwargs: dict) -> list:
        world = int(os.environ["WORLD_SIZE"])
        if self.size != world:
            raise ValueError(f"{self.size} ranks asked for, but torchrun has started {world} processes: "
                             f"use torchrun --nproc-per-node {self.size}, or ranks={world}")
        torch.set_num_threads(self.threads)
        limit = None if self.card is None else cards.Limit(self.card, _on_gpus(self.backend, world))
        if not dist.is_initialized():
            joined.join(_chosen(self.backend, int(os.environ["LOCAL_WORLD_SIZE"])), self.timeout)
        if limit is not None:
            limit.prepare()
            self._warn(limit.missing)
        results = [None] * world
        with limit or nullcontext(), use(topology=self.topology):
            result = fn(dist.group.WORLD, *args, **kwargs)
            shm.settle()
        dist.all_gather_object(results, result)
        return results

    def _warn(self, no_card: str) -> None:
        """Say that there is no card, and why, at the reader's own line; every time, though Python would say it once."""
        if no_card:
            assert self.card is not None
            frame = sys._getframe()
            while frame.f_back and Path(frame.f_code.co_filename).parent == Path(__file__).parent:
                frame = frame.f_back
            text = f"no card of {binary(self.card)} for the ranks, which run without a limit: {no_card}"
            warnings.warn_explicit(text, cards.UnlimitedWarning, frame.f_code.co_filename, frame.f_lineno)


def _check(size: int, backend: str, timeout: float, threads: int) -> None:
    for name, value in (("ranks", size), ("threads", threads)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} must be a whole number, not {value!r}: launch(fn, 4), ranks(4)")
        if value < 1:
            raise ValueError(f"{name} must be 1 or more, not {value}")
    if not isinstance(timeout, (int, float)) or not 0 < timeout < math.inf:
        raise ValueError(f"timeout must be a number of seconds above 0, not {timeout!r}")
    if backend not in _BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(_BACKENDS)}, not {backend!r}")


def _check_topology(size: int, topology: Topology | None) -> None:
    if topology is None:
        return
    if not isinstance(topology, Topology):
        raise TypeError(f"topology must be a specs.Topology, not {topology!r}")
    if topology.ranks != size:
        raise ValueError(f"a topology of {topology.nodes} × {topology.per_node} = {topology.ranks} ranks for {size}: "
                         "make them equal")


def _check_host(size: int, backend: str) -> None:
    """Whether this process can start `size` ranks beside itself."""
    if size > MOST_RANKS:
        raise ValueError(f"{size} ranks are more than the {MOST_RANKS} that one machine is asked to start")
    if backend == "nccl" and torch.cuda.device_count() < size:
        raise ValueError(f"nccl wants one GPU a rank: {size} ranks, {torch.cuda.device_count()} GPUs; "
                         "use backend='gloo', or fewer ranks")
    if not hasattr(os, "fork"):
        raise RuntimeError("ranks are forked, which Windows can't do: use WSL there")
    if IN_RANK in os.environ:
        raise RuntimeError("a rank can't start ranks of its own: call launch outside of the function that the ranks "
                           "run; for a group of some of the ranks there is torch.distributed.new_group")


def _on_gpus(backend: str, local: int) -> bool:
    """Whether each rank has a GPU."""
    return "nccl" in _chosen(backend, local)


def _chosen(backend: str, local: int) -> str:
    """What init_process_group is told for `backend` where `local` ranks share this host."""
    if backend == "auto":
        return "cpu:gloo,cuda:nccl" if torch.cuda.device_count() >= local else "gloo"
    return backend
