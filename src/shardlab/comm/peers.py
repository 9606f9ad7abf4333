"""A group as an algorithm sees it: who I am, how many we are, and messages to and from the others."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from . import flight, message

if TYPE_CHECKING:
    from .mark import Mark
    from .settings import Settings


class Peers:
    """The ranks of a group, numbered 0 to `size` − 1; `rank` is this one. Tensors are flat and contiguous.

    Both sides know how long a message is, so an empty one is not sent. Every message that is sent is entered in the
    ledger under the collective that `mark` stands for, whose tensor is `whole`.
    """

    def __init__(self, group: dist.ProcessGroup, settings: Settings, mark: Mark, whole: torch.Tensor | None = None):
        self.rank, self.size, self.device = group.rank(), group.size(), _device(group)
        self._ranks, self._group, self._settings, self._mark = list(mark.ranks), group, settings, mark
        self._span = range(whole.data_ptr(), whole.data_ptr() + whole.nbytes) if whole is not None else range(0)

    def send(self, x: torch.Tensor, to: int) -> None:
        """Send `x` to rank `to`, which must `recv` it; returns when it has."""
        self._messages(("isend", x, to))

    def recv(self, x: torch.Tensor, source: int) -> None:
        """Fill `x` with what rank `source` sends."""
        self._messages(("irecv", x, source))

    def exchange(self, given: torch.Tensor, to: int, taken: torch.Tensor, source: int) -> None:
        """Send `given` to rank `to` while `taken` is filled with what rank `source` sends."""
        self._messages(("isend", given, to), ("irecv", taken, source))

    def only(self, members: list[int]) -> Peers:
        """The same for some of the ranks, numbered anew in that order; this rank's number is −1 if it is not one."""
        some = copy(self)
        some._ranks, some.size = [self._ranks[member] for member in members], len(members)
        some.rank = members.index(self.rank) if self.rank in members else -1
        return some

    def nodes(self) -> list[list[int]]:
        """The ranks of each node of the topology, in order; without a topology all are on one."""
        topology = self._settings.topology
        nodes: dict[int, list[int]] = {}
        for number, rank in enumerate(self._ranks):
            nodes.setdefault(topology.node(rank) if topology else 0, []).append(number)
        return list(nodes.values())

    def _messages(self, *wanted: tuple[str, torch.Tensor, int]) -> None:
        parts = [(kind, x, self._ranks[peer]) for kind, x, peer in wanted if len(x)]
        words = {"isend": "sending to", "irecv": "waiting for"}
        flight.enter(f"{self._mark.text}: {', '.join(f'{words[kind]} rank {peer}' for kind, _, peer in parts)}")
        started = message.start([message.Part(kind, x, peer, self._mark.agreed, self._offset(x))
                                 for kind, x, peer in parts], self._group, self._settings, [self._mark] * len(parts), 1)
        for pending in reversed(started):
            pending.wait()

    def _offset(self, x: torch.Tensor) -> int:
        return x.data_ptr() - self._span.start if x.data_ptr() in self._span else -1


def _device(group: dist.ProcessGroup) -> torch.device:
    """Where a tensor must be to travel in `group`."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
