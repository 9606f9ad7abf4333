"""How the verbs run: with which algorithm, through what, at the speed of which links. Set by `with comm.use(…):`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from ..specs import Topology
from ..specs.check import flag
from . import shm
from .algorithms import names

BACKEND = "backend"


@dataclass(frozen=True)
class Settings:
    """`algorithm`: "backend" for the backend's own collectives, else the name of one made of messages. `transport`:
    "backend" or "shm". `topology`: where ranks are placed, on links that are slowed. `debug`: ranks first tell each
    other what they are about to do, and raise if they differ."""

    algorithm: str = BACKEND
    transport: str = BACKEND
    topology: Topology | None = None
    debug: bool = False


_settings = [Settings()]  # the innermost `use` last


def now() -> Settings:
    """The settings of the innermost `use` around the call."""
    return _settings[-1]


@contextmanager
def use(algorithm: str | None = None, *, transport: str | None = None, topology: Topology | None = None,
        debug: bool | None = None) -> Iterator[None]:
    """Run the verbs in the block with other settings; what is left out stays as it is around the block.

        with comm.use("ring"):                  every collective made of messages, all-reduces as a ring
        with comm.use(transport="shm"):         through memory that the ranks of this host share
        with comm.use("two_level", topology=T): ranks placed on T's nodes, messages between them as slow as T's links
        with comm.use("backend", debug=True):   gloo's or NCCL's own again, checked before each call

    A verb that has no algorithm of that name takes its only one. Under a topology every collective is made of messages,
    rings where none is named: what happens inside the backend's own can't be slowed. All ranks must use the same
    settings. They hold for the whole process, autograd's threads included: enter from one thread.

    Raises ValueError on an unknown algorithm or transport, and where ranks share no memory.
    """
    known = [BACKEND, *names()]
    if algorithm is not None and algorithm not in known:
        raise ValueError(f"no algorithm {algorithm!r}; use one of {', '.join(known)}")
    if transport not in (None, BACKEND, "shm"):
        raise ValueError(f"no transport {transport!r}; use 'shm', or 'backend' for gloo's or NCCL's own")
    if topology is not None and not isinstance(topology, Topology):
        raise TypeError(f"topology must be a specs.Topology, not {topology!r}")
    if debug is not None:
        flag("debug", debug)
    if transport == "shm":
        shm.here()  # says why, where there is none
    given: dict[str, Any] = {"algorithm": algorithm, "transport": transport, "topology": topology, "debug": debug}
    _settings.append(replace(_settings[-1], **{name: value for name, value in given.items() if value is not None}))
    try:
        yield
    finally:
        _settings.pop()
