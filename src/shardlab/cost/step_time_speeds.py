"""What a prediction of time takes for granted: how much of a card and of a link real software reaches."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields

from ..specs import ClusterSpec
from ..specs.units import decimal, seconds
from .bill import Row

SHARES = ("share", "memory", "links", "overlap", "paired", "lent")
MEANT = {
    "share": "of the card's dense FLOP/s, in matrix products and attention",
    "memory": "of the rate of the card's memory",
    "links": "of a link's rate, in collectives and messages",
    "overlap": "of a pass that the data axis's collectives, and a ring's messages, can hide behind",
    "paired": "of the experts' messages that hide in a pair of passes (DualPipe)",
    "lent": "of a card's arithmetic that moves messages while a pair runs",
    "skew": "rows of the busiest rank's experts over the mean",
    "overhead": "for each layer and pass, in which nothing is computed",
}


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """The parameters that no formula gives. What is left out is assumed; `measured` names those that were measured,
    "card" and "cluster" among them: else what these say is from datasheets.

    `share`, `memory` and `links` are parts of what a card and a link are said to do. `overlap` is the part of a pass
    behind which the data axis's collectives, or the messages of a ring of keys and values, can hide. In schedules that
    pair a forward with a backward pass, `paired` is the part of the experts' messages that hide behind the other pass's
    arithmetic, which is slower by what is `lent` to move them: 20 of 132 multiprocessors, and everything hidden, in
    DeepSeek-V3 (arXiv:2412.19437, §3.2). `skew` is how many rows the busiest rank's experts get over the mean.
    `overhead` is seconds for each layer in a forward pass, and in each half of a backward pass. Raises ValueError on
    parts that are not between 0 and 1, a skew below 1, an overhead below 0, and a measured name that there isn't.
    """

    share: float = 0.6
    memory: float = 0.8
    links: float = 0.8
    overlap: float = 0.8
    paired: float = 1.0
    lent: float = 20 / 132
    skew: float = 1.0
    overhead: float = 0.0
    measured: Collection[str] = ()

    def __post_init__(self):
        for name in SHARES:
            value, least = getattr(self, name), name in ("share", "memory", "links")
            if not (0 < value <= 1 if least else 0 <= value <= 1):
                raise ValueError(f"{name} = {value} is a part, {MEANT[name]}: {'above 0' if least else '0'} to 1")
        if not 1 <= self.skew < float("inf") or not 0 <= self.overhead < float("inf"):
            raise ValueError(f"skew = {self.skew} is 1 at least, and overhead = {self.overhead} seconds from 0")
        known = ("card", "cluster", *MEANT)
        if unknown := [name for name in self.measured if name not in known]:
            raise ValueError(f"measured names {unknown[0]!r}, which is none of {', '.join(known)}")

    def how(self, name: str) -> str:
        """Where the value comes from: "measured", "datasheet" or "assumed"."""
        if name in self.measured:
            return "measured"
        return "datasheet" if name in ("card", "cluster") else "assumed"

    def rows(self, cluster: ClusterSpec, arithmetic: str) -> Iterator[Row]:
        """All of them, and what the cluster is said to do, each with where it comes from."""
        card = cluster.card
        yield Row("card", f"{card.name}: in {arithmetic}, memory "
                  f"{decimal(card.hbm)}/s", card.flop_rate(arithmetic) / 1e12, "TFLOP/s", self.how("card"))
        for where, link in (("inside", cluster.inside), ("between", cluster.between)):
            alpha = "no α known" if link.alpha is None else f"α {seconds(link.alpha)}"
            yield Row(f"link {where}", f"{link.name}: {alpha}", link.per_direction / 1e9,
                      "GB/s", self.how("cluster"))
        for field in fields(self):
            if field.name in MEANT:
                unit = {"skew": "×", "overhead": "s"}.get(field.name, "of 1")
                yield Row(field.name, MEANT[field.name], round(getattr(self, field.name), 6), unit,
                          self.how(field.name))
