"""Ranks that torchrun has started, on one machine or several: this process joins them instead of starting any."""

from __future__ import annotations

import atexit
import os
import tempfile
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from ..comm import links, shm
from . import interface
from .crew import environ
from .rank import IN_RANK

ALL = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launched() -> bool:
    """Whether torchrun has started this process, or something else that sets all of its variables, and not we."""
    return IN_RANK not in os.environ and (dist.is_torchelastic_launched() or all(name in os.environ for name in ALL))


def stands() -> int:
    """This process's rank."""
    return int(os.environ["RANK"])


def join(backend: str, timeout: float) -> None:
    """Make torchrun's process group, for as long as this process lives: a second run takes the same one. `backend` is
    what `init_process_group` is told, `timeout` in seconds for each collective.

    Gloo takes the loopback where all ranks are on this host, else the interface that leads to the first rank's, unless
    GLOO_SOCKET_IFNAME names another.
    """
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    if local == int(os.environ["WORLD_SIZE"]):
        os.environ.update(environ())
    elif leads := interface.towards(os.environ["MASTER_ADDR"]):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", leads)
    if "nccl" in backend:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    atexit.register(dist.destroy_process_group)
    _share_memory(timeout)
    if local == int(os.environ["WORLD_SIZE"]):
        _share_nics(int(os.environ["RANK"]), local)


def _share_memory(timeout: float) -> None:
    """Have torchrun's processes share memory, if all are on this host: the first makes it and says where it is."""
    rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    segment, why_not = None, f"torchrun has {local} of the {world} ranks on this host"
    if local == world:
        if rank == 0:
            segment, why_not = shm.attempt(shm.Segment.passed_on, world)
        said: list = [None] * world
        dist.all_gather_object(said, (segment.path if segment else "", why_not))
        path, why_not = said[0]
        if rank and path:
            segment, why_not = shm.attempt(partial(shm.Segment.open, path), world)
    shm.join(rank, timeout, segment, why_not)


def _share_nics(rank: int, world: int) -> None:
    """Have torchrun's processes, all on this host, share the clocks of emulated links: a file that is gone at once."""
    path = ""
    if rank == 0:
        file, path = tempfile.mkstemp(prefix="shardlab-")
        os.close(file)
    paths = [path] * world
    dist.all_gather_object(paths, path)
    links.open(paths[0])
    dist.all_gather_object(paths, path)  # all have it open
    if path:
        os.unlink(path)
