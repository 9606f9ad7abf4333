"""Which links the ranks of an axis talk over, and how long a collective takes there.

Ranks are taken to fill the domains of the cluster in order. A group inside one domain is a ring on its link. One that
spans domains does what `two_level` does: rings inside each domain, and between domains a ring of the ranks of each
place, over as many ports as there are places (as NCCL's rings use all ports of a server). A group whose parts in the
domains are not alike counts as if every message went between domains.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

from ..specs import ClusterSpec, Layout
from .comm import hops, serial_bytes
from .step_time_speeds import Speeds


class Group(NamedTuple):
    """`ranks` ranks, of which `inside` at a time share a domain."""

    ranks: int
    inside: int

    @property
    def domains(self) -> int:
        """Over how many domains they lie."""
        return self.ranks // self.inside


def group_of(ranks: int, stride: int, cluster: ClusterSpec) -> Group:
    """The group of `ranks` ranks, `stride` apart, on the cluster."""
    per = cluster.per_domain
    if cluster.domains == 1:
        return Group(ranks, ranks)
    if per % stride:
        return Group(ranks, 1)
    return Group(ranks, gcd(ranks, per // stride))


def groups_of(layout: Layout, cluster: ClusterSpec) -> dict[str, Group]:
    """The group of each axis: "tp", "cp", "ep", "edp" (ranks with the same experts), "data" (dp and cp together) and
    "pp". Where a stage is on two ranks, those of both sum its gradients."""
    near, copies = layout.distance("tp"), 2 if layout.kind == "dualpipe" and layout.pp > 1 else 1
    spread = near * layout.expert_tp
    sizes = {"tp": (layout.tp, near), "cp": (layout.cp, layout.distance("cp")), "ep": (layout.ep, spread),
             "edp": (layout.expert_replicas, spread * layout.ep), "data": (layout.data_ranks, layout.distance("cp")),
             "pp": (layout.pp, layout.distance("pp"))}
    groups = {axis: group_of(*size, cluster) for axis, size in sizes.items()}
    return {axis: Group(group.ranks * copies, group.inside) if axis in ("edp", "data") else group
            for axis, group in groups.items()}


class Sent(NamedTuple):
    """What a rank sends inside its domain and between domains: bytes, and messages that follow one another."""

    inside: float = 0.0
    between: float = 0.0
    hops_inside: float = 0.0
    hops_between: float = 0.0

    def times(self, n: float) -> Sent:
        """So often."""
        return Sent(*(each * n for each in self))

    def plus(self, other: Sent) -> Sent:
        """One after the other."""
        return Sent(*map(sum, zip(self, other, strict=True)))

    def apart(self, cluster: ClusterSpec, speeds: Speeds) -> tuple[float, float]:
        """Seconds inside, and between."""
        return (self.hops_inside * (cluster.inside.alpha or 0.0)
                + self.inside / (cluster.inside.per_direction * speeds.links),
                self.hops_between * (cluster.between.alpha or 0.0)
                + self.between / (cluster.between.per_direction * speeds.links))

    def seconds(self, cluster: ClusterSpec, speeds: Speeds) -> float:
        """Seconds, one after the other."""
        return sum(self.apart(cluster, speeds))


def sent(op: str, nbytes: float, group: Group) -> Sent:
    """What a rank of the group sends for a collective of which it hands in `nbytes`: all_reduce, all_gather or
    reduce_scatter."""
    k, n = group.inside, group.domains
    if op == "all_gather":
        first, across = nbytes * n, nbytes  # each place gathers over the domains, then all places inside
    else:
        first, across = nbytes, nbytes / k
    return Sent(serial_bytes(op, "ring", first, k), serial_bytes(op, "ring", across, n), hops(op, "ring", k),
                hops(op, "ring", n))


def handed_out(tokens: float, row: float, active: int, reach: int | None, group: Group) -> Sent:
    """What a rank sends to experts, `tokens` tokens of `row` bytes to `active` experts each, all asked for alike. With
    `reach`, a token goes to so many domains at most, once to each, and is handed on there, as in `cost.dispatch`."""
    k, n = group.inside, group.domains
    copies = active if reach is None else min(active, reach, n)
    across = tokens * copies * row * (n - 1) / n
    within = tokens * active * row * (k - 1) / (group.ranks if reach is None else k)
    return Sent(within, across, k - 1, n - 1 if reach is not None else group.ranks - k)


def round_the_ring(nbytes: float, messages: int, group: Group) -> Sent:
    """`nbytes` in so many messages to the next rank of a ring, each time all ranks at once: where the ring spans
    domains, those between them set the pace."""
    if group.ranks == 1:
        return Sent()
    return Sent(nbytes, 0, messages, 0) if group.domains == 1 else Sent(0, nbytes, 0, messages)
