"""Which ranks share a node, and what link is between any two of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .check import whole
from .link import LinkSpec


@dataclass(frozen=True, kw_only=True)
class Topology:
    """`nodes` nodes of `per_node` ranks each, in order: node i has the ranks i · per_node … (i+1) · per_node − 1.

    `between` is what one network card (NIC) has, in one direction; `inside` what one rank has inside its node. Where it
    is None, messages inside a node take no time in a price, and are not slowed when links are emulated. `nic` "node" is
    one NIC a node, which its ranks share first come first served, each direction on its own; "rank" is one a rank. A
    link whose `alpha` is None costs no time a message. `Topology(nodes=p, per_node=1, between=link)` is p ranks joined
    by one kind of link. Raises ValueError on sizes below 1, on what is no link, and on another `nic`.
    """

    nodes: int
    per_node: int
    between: LinkSpec
    inside: LinkSpec | None = None
    nic: Literal["node", "rank"] = "node"

    def __post_init__(self):
        whole("nodes", self.nodes)
        whole("per_node", self.per_node)
        for name, link in (("between", self.between), ("inside", self.inside)):
            if not isinstance(link, LinkSpec) and not (name == "inside" and link is None):
                raise ValueError(f"{name} must be a link, not {link!r}: find_link(\"ib-ndr\") is one")
        if self.nic not in ("node", "rank"):
            raise ValueError(f"nic must be 'node' (one NIC for the {self.per_node} ranks of a node) or 'rank' (one "
                             f"each), not {self.nic!r}")

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return self.nodes * self.per_node

    def node(self, rank: int) -> int:
        """The node of a global rank. Raises ValueError on a rank that isn't there."""
        if whole("rank", rank, least=0) >= self.ranks:
            raise ValueError(f"no rank {rank} on {self.nodes} nodes of {self.per_node}: the last is {self.ranks - 1}")
        return rank // self.per_node

    def link(self, a: int, b: int) -> LinkSpec | None:
        """The link between two global ranks: `inside`, where they share a node, or `between`. None for a rank and
        itself. Raises ValueError on a rank that isn't there."""
        here, there = self.node(a), self.node(b)
        if here != there:
            return self.between
        return None if a == b else self.inside
