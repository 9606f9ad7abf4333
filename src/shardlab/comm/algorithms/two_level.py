"""Two levels: what can be added up inside a node is, before anything crosses the slow link between nodes.

    two nodes of two ranks: 0 1 │ 2 3

    1. inside each node    reduce-scatter: rank 0 has the node's sum of the first half, rank 1 of the second
    2. across              0 with 2, and 1 with 3, all-reduce their halves: together one tensor, not two
    3. inside each node    all-gather: everybody has both halves

In a ring over all ranks a piece crosses the slow link in each of the 2 (p − 1) steps. Here only in 2 (nodes − 1).
"""

from __future__ import annotations

import torch

from ..peers import Peers
from . import ring
from .ring import Combine


def all_reduce(x: torch.Tensor, combine: Combine, peers: Peers) -> None:
    """Combine the flat tensor `x` over all ranks, in place; all rings.

    Raises ValueError where the nodes do not hold equally many ranks of the group.
    """
    nodes = peers.nodes()
    if len({len(node) for node in nodes}) > 1:
        raise ValueError("two levels need equally many ranks of the group on each node, "
                         f"not {list(map(len, nodes))}: use another algorithm")
    node = next(node for node in nodes if peers.rank in node)
    place = node.index(peers.rank)
    inside, across = peers.only(node), peers.only([other[place] for other in nodes])
    pieces = list(x.tensor_split(len(node)))
    mine = ring.reduce_scatter(pieces, combine, inside)
    ring.all_reduce(mine, combine, across)
    ring.all_gather(pieces, inside)
