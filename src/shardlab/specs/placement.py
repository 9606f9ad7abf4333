"""Redundant experts: hot ones are held several times, so that no rank has much more to do than others.

The problem that DeepSeek's EPLB solves (github.com/deepseek-ai/EPLB; DeepSeek-V3, arXiv:2412.19437, §3.4.1), in three
steps. Each further slot goes to the expert with the most load per copy. Copies are packed, the heaviest first, on the
rank that has least and has room (Graham's rule for machines, SIAM J. Appl. Math. 17(2), 1969). Then the heaviest rank
swaps a copy with another as long as that makes it lighter, and it is not within a thousandth of the mean.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .check import whole

ENOUGH = 1.001  # the heaviest over the mean from which swapping stops


@dataclass(frozen=True)
class Placement:
    """Which experts each rank holds: `slots[r]` are rank r's, equally many on each. An expert in several slots takes
    equal parts of its tokens in each. Ranks of one of the `nodes` are neighbours. Raises ValueError on ranks with
    unequally many slots, and on an expert of 0 to `experts` − 1 that has none.
    """

    slots: tuple[tuple[int, ...], ...]
    experts: int
    nodes: int = 1

    def __post_init__(self):
        if len(sizes := {len(rank) for rank in self.slots}) != 1:
            raise ValueError(f"ranks have {sorted(sizes)} slots: equally many are wanted")
        if missing := set(range(self.experts)) - set(self.copies):
            raise ValueError(f"expert {min(missing)} of {self.experts} has no slot")

    @property
    def copies(self) -> Counter[int]:
        """How many slots each expert has."""
        return Counter(expert for rank in self.slots for expert in rank)

    def loads(self, load: Sequence[float]) -> list[float]:
        """What each rank has to do, where `load` is what each expert has."""
        if len(load) != self.experts:
            raise ValueError(f"load has {len(load)} numbers, and there are {self.experts} experts")
        copies = self.copies
        return [sum(load[expert] / copies[expert] for expert in rank) for rank in self.slots]

    def skew(self, load: Sequence[float]) -> float:
        """The busiest rank's load over the mean: the clock of a layer, since all wait for it. 1 where there is none."""
        loads = self.loads(load)
        return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0

    def reached(self, chosen: Iterable[int]) -> int:
        """How many nodes have to be reached for these experts at most, where any copy may be asked."""
        size = len(self.slots) // self.nodes
        wanted = set(chosen)
        return len({rank // size for rank, held in enumerate(self.slots) if wanted & set(held)})


def plain(experts: int, ranks: int) -> Placement:
    """Without redundant experts, in their order: rank r of p has r·n/p to (r+1)·n/p, as `expert.cut` leaves them.
    Raises ValueError where the ranks don't share them out equally."""
    some, rest = divmod(whole("experts", experts), whole("ranks", ranks))
    if rest or not some:
        raise ValueError(f"{experts} experts do not divide over {ranks} ranks")
    return Placement(tuple(tuple(range(r * some, (r + 1) * some)) for r in range(ranks)), experts)


def place(load: Sequence[float], ranks: int, slots: int, *, groups: int = 1, nodes: int = 1) -> Placement:
    """Hold the experts, whose loads these are (tokens, or shares of them), in `slots` slots on `ranks` ranks.

    With `groups` of neighbouring experts and several `nodes`, all slots of a group are on one node, and each node has
    equally many groups: a token that chooses from n groups reaches n nodes at most. Never worse than with fewer slots,
    one for each expert, where ranks share those out equally; on one node never worse than `plain`. Raises ValueError on
    loads that are none, and where slots, groups, nodes and ranks don't divide, or slots are fewer than experts.
    """
    n = len(load)
    _check(load, whole("ranks", ranks), whole("slots", slots), whole("groups", groups), whole("nodes", nodes))
    of_group = n // groups
    heavy = [sum(load[g * of_group : (g + 1) * of_group]) for g in range(groups)]
    homes = _pack([(weight, g) for g, weight in enumerate(heavy)], nodes, groups // nodes)
    held: list[list[int]] = []
    for home in homes:
        experts = [g * of_group + i for g in sorted(home) for i in range(of_group)]
        held += _node({expert: load[expert] for expert in experts}, ranks // nodes, slots // nodes)
    return Placement(tuple(tuple(sorted(rank)) for rank in held), n, nodes)


def _node(load: dict[int, float], ranks: int, slots: int) -> list[list[int]]:
    """The experts of each rank of a node: the best of several ways."""
    ways, room = [_replicated(load, ranks, slots)], slots // ranks
    if len(load) % ranks == 0:  # where copies gain nothing they stand beside their own
        some, names = len(load) // ranks, list(load)
        single = [_replicated(load, ranks, len(load)), [names[r * some : (r + 1) * some] for r in range(ranks)]]
        ways += [[(rank * room)[:room] for rank in held] for held in single]
    return min(ways, key=lambda held: _most(load, held))


def _most(load: dict[int, float], held: list[list[int]]) -> float:
    """What the heaviest rank has."""
    copies = Counter(expert for rank in held for expert in rank)
    return max(sum(load[expert] / copies[expert] for expert in rank) for rank in held)


def _replicated(load: dict[int, float], ranks: int, slots: int) -> list[list[int]]:
    copies = dict.fromkeys(load, 1)
    order = [(-weight, expert) for expert, weight in load.items()]
    heapq.heapify(order)
    for _ in range(slots - len(load)):
        _, expert = heapq.heappop(order)
        copies[expert] += 1
        heapq.heappush(order, (-load[expert] / copies[expert], expert))
    items = [(load[expert] / times, expert) for expert, times in copies.items() for _ in range(times)]
    return _pack(items, ranks, slots // ranks)


def _pack(items: list[tuple[float, int]], bins: int, room: int) -> list[list[int]]:
    """(weight, name) of each item, into `bins` bins of `room` items each: the names in each bin."""
    held: list[list[tuple[float, int]]] = [[] for _ in range(bins)]
    loads = [0.0] * bins
    for item in sorted(items, key=lambda item: (-item[0], item[1])):
        free = [b for b in range(bins) if len(held[b]) < room]
        # a second copy in the same bin would not help
        lightest = min(free, key=lambda b: (item[1] in (name for _, name in held[b]), loads[b]))
        held[lightest].append(item)
        loads[lightest] += item[0]
    while max(loads) * bins > sum(loads) * ENOUGH and _swap(held, loads):
        pass
    return [[name for _, name in some] for some in held]


def _swap(held: list[list[tuple[float, int]]], loads: list[float]) -> bool:
    """Whether the heaviest bin could be made lighter: its best exchange of one item with another bin's, which must
    become less heavy than it was, is done."""
    top = max(range(len(loads)), key=loads.__getitem__)
    best, least = None, loads[top] * (1 - 1e-12)
    for b, others in enumerate(held):
        for i, mine in enumerate(held[top]):
            for j, other in enumerate(others):
                less = mine[0] - other[0]
                if b != top and less > 0 and max(loads[top] - less, loads[b] + less) < least:
                    best, least = (b, i, j, less), max(loads[top] - less, loads[b] + less)
    if best is None:
        return False
    b, i, j, less = best
    held[top][i], held[b][j] = held[b][j], held[top][i]
    loads[top], loads[b] = loads[top] - less, loads[b] + less
    return True


def _check(load: Sequence[float], ranks: int, slots: int, groups: int, nodes: int) -> None:
    n = len(load)
    if not n or not all(0 <= weight < float("inf") for weight in load):
        raise ValueError(f"load must hold numbers of at least 0, one for each expert, not {list(load)[:8]}")
    if slots < n:
        raise ValueError(f"{slots} slots are fewer than {n} experts: each needs one")
    for what, some, among, whom in (("slots", slots, ranks, "ranks"), ("ranks", ranks, nodes, "nodes"),
                                    ("experts", n, groups, "groups"), ("groups", groups, nodes, "nodes")):
        if some % among and not (what == "groups" and nodes == 1):
            raise ValueError(f"{some} {what} do not divide over {among} {whom}")
    if slots // nodes < n // nodes or nodes > groups:
        raise ValueError(f"{groups} groups of experts are fewer than {nodes} nodes: each needs one")
