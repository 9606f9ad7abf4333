"""What experts on other ranks will cost, before a router has chosen: bytes of an all-to-all, and who is waited for.

    dispatch    tokens × active experts × hidden × bytes, of which (p − 1)/p leaves the rank on average

It has nothing to do with how many experts there are. How the load is spread over them has no part in that either, but
in the time: a layer is done when the rank with most rows is, so its load over the mean is the clock. Formulas with no
run behind them; `expert_traffic` has the exact bytes of what a router did choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..specs import CardSpec, Layout, ModelSpec, Topology
from ..specs.check import whole
from ..specs.layout import layout_of
from ..specs.placement import Placement, plain
from .bill import Bill, Row
from .kv import width_of
from .messages import messages
from .transfers import seconds


@dataclass(frozen=True, repr=False, eq=False)
class Dispatch(Bill):
    """One pass of `tokens` tokens a rank through a layer with experts. `shares[r]` is the part of all rows that rank r
    of the ep group gets. With `reach`, a token goes to so many of the `nodes` at most, once to each, and is handed on
    there; else to each of its experts on its own."""

    spec: ModelSpec
    layout: Layout
    tokens: int
    dtype: str
    back: str
    shares: tuple[float, ...]
    nodes: int
    reach: int | None

    @property
    def ranks(self) -> int:
        """How many ranks, or groups of etp ranks, share the experts."""
        return self.layout.ep

    @property
    def copies(self) -> int:
        """How often a token leaves for other ranks' experts: to each of them, or to each node that it may reach."""
        active = self.spec.experts.active if self.spec.experts else 0
        return active if self.reach is None else min(self.reach, active, self.nodes)

    @property
    def per_token(self) -> int:
        """Bytes that a token is handed out in, to each of its experts."""
        assert self.spec.experts is not None
        return self.spec.experts.active * self.spec.hidden * width_of(self.dtype)

    @property
    def over_network(self) -> int:
        """Bytes that a token takes between nodes at most."""
        return self.copies * self.spec.hidden * width_of(self.dtype) if self.nodes > 1 else 0

    @property
    def payload(self) -> int:
        """Bytes that a rank hands to the dispatch."""
        return self.tokens * self.per_token

    @property
    def combined(self) -> float:
        """Bytes that a rank hands to the combine, on average."""
        return self.payload * width_of(self.back) / width_of(self.dtype)

    @property
    def leaving(self) -> float:
        """Bytes of the payload that leave the rank: on average over the ranks, however the load is spread."""
        return self.payload * (self.ranks - 1) / self.ranks

    @property
    def across(self) -> float:
        """Bytes that leave the node: on average, where tokens go to all nodes alike."""
        return self.tokens * self.over_network * (self.nodes - 1) / self.nodes

    @property
    def skew(self) -> float:
        """The busiest rank's rows over the mean."""
        return max(self.shares) * self.ranks

    @property
    def node_skew(self) -> float:
        """The same of the busiest node."""
        size = self.ranks // self.nodes
        return max(sum(self.shares[i * size : (i + 1) * size]) for i in range(self.nodes)) * self.nodes

    @property
    def rows_of_busiest(self) -> float:
        """Rows that the busiest rank's experts get."""
        assert self.spec.experts is not None
        return self.tokens * self.spec.experts.active * self.skew

    def seconds(self, topology: Topology) -> float:
        """Of the dispatch. Without `reach`, that of its messages, pair by pair (`transfers.seconds`). With it, two
        steps one after the other: over each rank's own port to the node, inside it to the ranks; the busiest of each
        sets the time. DeepSeek-V3 has them overlap (arXiv:2412.19437, §3.2.2): then it is the longer one. Raises
        ValueError on a topology of other nodes or ranks."""
        if (topology.nodes, topology.ranks) != (self.nodes, self.ranks):
            raise ValueError(f"the experts lie on {self.ranks} ranks of {self.nodes} nodes, and the topology has "
                             f"{topology.ranks} of {topology.nodes}")
        if self.reach is None:
            rows = self.payload / (self.spec.hidden * width_of(self.dtype))
            splits = [[round(rows * share) for share in self.shares]] * self.ranks
            row = self.spec.hidden * width_of(self.dtype)
            return seconds(messages("all_to_all", "pairwise", 0, row, self.ranks, splits=splits), topology)
        steps, inside = [(topology.between, self.nodes, self.across * self.node_skew)], topology.per_node
        if topology.inside is not None:
            steps.append((topology.inside, inside, self.payload * (inside - 1) / inside * self.skew))
        if topology.nic == "node":
            steps[0] = (topology.between, self.nodes, steps[0][2] * inside)
        return sum((peers - 1) * (link.alpha or 0.0) + nbytes / link.per_direction for link, peers, nbytes in steps)

    def compute(self, card: CardSpec, dtype: str = "bf16") -> float:
        """Seconds that the busiest rank's expert products take forward at least: 2 FLOP a row for each number of an
        expert's three matrices, at the card's peak. Backward takes twice that."""
        assert self.spec.experts is not None
        flop = 6 * self.spec.hidden * self.spec.experts.ffn * self.rows_of_busiest / self.layout.expert_tp
        return flop / card.flop_rate(dtype)

    @property
    def title(self) -> str:
        return (f"{self.spec.name}, {self.layout.degrees}, {self.tokens:,} tokens a rank: to experts and back, a "
                f"layer, on {self.ranks} ranks of {self.nodes} node{'s' * (self.nodes > 1)}")

    @property
    def rows(self) -> list[Row]:
        assert self.spec.experts is not None
        there = f"{self.spec.hidden:,} × {width_of(self.dtype)} B ({self.dtype})"
        p, n, tokens = self.ranks, self.nodes, f"{self.tokens:,} token{'s' * (self.tokens > 1)}"
        rows = [Row("a token", f"{self.spec.experts.active} experts × {there}", self.per_token)]
        if n > 1 and self.reach is not None:
            rows.append(Row("a token, over the network", f"at most {self.copies} nodes × {there}", self.over_network))
        rows += [Row("dispatch", f"{tokens} × {self.per_token:,} B", self.payload),
                 Row("  off the rank", f"× {p - 1}/{p}, on average", self.leaving)]
        if n > 1:
            rows.append(Row("  off the node", f"{tokens} × {self.over_network:,} B × {n - 1}/{n}, on average",
                            self.across))
        rows.append(Row("combine", f"{tokens} × {self.spec.experts.active} experts × {self.spec.hidden:,} × "
                        f"{width_of(self.back)} B ({self.back}), on average", self.combined))
        rows.append(Row("the busiest rank takes", f"{self.skew:.3f} × the mean", self.payload * self.skew))
        return rows

    @property
    def footnotes(self) -> list[str]:
        scales = " Scales of fp8 are left out." if "fp8" in (self.dtype, self.back) else ""
        return [f"Backward sends as much again. From formulas: no run is behind it.{scales}"]

    def to_dict(self) -> dict[str, Any]:
        """The account as plain data: inputs, bytes, skew, rows."""
        inputs = {"model": self.spec.name, **asdict(self.layout), "tokens": self.tokens, "dtype": self.dtype,
                  "back": self.back, "nodes": self.nodes, "reach": self.reach, "shares": list(self.shares)}
        kinds = ("per_token", "over_network", "payload", "combined", "leaving", "across", "skew")
        return {**inputs, **{kind: getattr(self, kind) for kind in kinds}, **super().to_dict()}


def dispatch(spec: ModelSpec, layout: Layout, tokens: int, *, dtype: str = "bf16", back: str | None = None,
             load: Sequence[float] | None = None, placement: Placement | None = None, nodes: int = 1,
             reach: int | None = None) -> Dispatch:
    """What a layer's tokens will take to experts and back: `tokens` of each of the ep group's ranks.

    Rows go out in `dtype` and come back in `back` (the same if None): "fp8", a byte a number, or a plain one. `load` is
    what each expert is asked for, in any unit (all alike if None); `placement` says which ranks have it (in order, if
    None), redundant ones included. The ranks are those of `nodes` nodes, of which a token may go to `reach` at most.
    Raises ValueError on a model without experts, on a layout that it doesn't allow, on a placement of other experts or
    ranks, on nodes that don't divide the ranks, and on an unknown dtype.
    """
    layout = layout_of(layout)
    if spec.experts is None:
        raise ValueError(f"{spec.name} has no experts to send tokens to")
    if placement is None:
        layout.check(spec)
        placement = plain(spec.experts.routed, layout.ep)
    held = len(placement.slots) * len(placement.slots[0])
    if (placement.experts, len(placement.slots)) != (spec.experts.routed, layout.ep):
        raise ValueError(f"the placement is of {placement.experts} experts on {len(placement.slots)} ranks; "
                         f"{spec.experts.routed} on ep = {layout.ep} are wanted")
    layout.check(spec, held - spec.experts.routed)
    if layout.ep % whole("nodes", nodes):
        raise ValueError(f"ep = {layout.ep} ranks do not divide over {nodes} nodes")
    if reach is not None and whole("reach", reach) > nodes:
        raise ValueError(f"reach = {reach}: there are {nodes} nodes")
    loads = placement.loads([1.0] * spec.experts.routed if load is None else load)
    if not sum(loads) > 0:
        raise ValueError("load is 0 for all experts")
    for each in (dtype, back or dtype):
        width_of(each)
    return Dispatch(spec, layout, whole("tokens", tokens), dtype, back or dtype,
                    tuple(each / sum(loads) for each in loads), nodes, reach)
