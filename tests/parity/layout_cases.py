"""Which layouts there are, and cases to train: the matrix's.

`Layout` itself is asked: all combinations are tried, and those that it accepts are the matrix, so that none is left out
by hand. Of more than can be run a covering set is: whatever two choices go together in a layout, model, batch or
optimizer are together in one of its cases.
"""

import sys
from contextlib import suppress
from dataclasses import fields, replace
from itertools import permutations, product
from random import Random
from typing import NamedTuple

from shardlab.schedule import CHUNKS, SCHEDULES
from shardlab.specs import Layout

FREE = {"moe": (False, True), "tied": (False, True), "labels": ("equal", "ragged", "one without"),
        "optimizer": ("momentum", "adamw"),
        "transport": ("backend", "shm") if sys.platform == "linux" else ("backend",)}


class Plain(NamedTuple):
    """What the plain model's training depends on: how many layers and micro-batches, what they are like, the optimizer,
    and whether the loss has a term for even loads."""

    layers: int
    count: int
    moe: bool
    tied: bool
    labels: str
    optimizer: str
    balanced: bool


class Case(NamedTuple):
    layout: Layout
    moe: bool = False
    tied: bool = True
    labels: str = "ragged"
    optimizer: str = "adamw"
    transport: str = "backend"

    @property
    def plain(self) -> Plain:
        given = self.layout
        # of a cut sequence the balance of loads is of each rank's tokens, another number than the plain model's
        return Plain(max(2, given.stages + (given.pp > 1)), given.dp * given.microbatches, self.moe, self.tied,
                     self.labels, self.optimizer, self.moe and given.cp == 1)

    def __str__(self):
        parts = [f"{each.name}={getattr(self.layout, each.name)!r}" for each in fields(Layout)
                 if getattr(self.layout, each.name) != each.default]
        return f"Layout({', '.join(parts)}), {', '.join(map(str, self[1:]))}"


def accepted(ranks):
    """All that `Layout` takes for so many ranks, in the default order; of micro-batches a number that pp divides and
    one that it does not, where the schedule has both."""
    degrees = [n for n in range(1, ranks + 1) if ranks % n == 0]
    ways = product(degrees, degrees, degrees, degrees, degrees, (None, 1), range(4), (False, "keep", "again"))
    for pp, dp, cp, tp, ep, etp, stage, sp in ways:
        if pp * dp * cp * tp == ranks and (tp > 1 or etp is None):
            for how in pipelines(pp):
                with suppress(ValueError):
                    yield Layout(tp, dp=dp, pp=pp, cp=cp, ep=ep, etp=etp, zero=stage, sp=sp, **how)


def pipelines(pp):
    """Schedules, micro-batches and chunks to try; dualpipe is left out, which has each stage on two ranks."""
    if pp == 1:
        return [dict(microbatches=2)]
    least = {"dualpipe_v": 2 * pp}
    return [dict(schedule=name, microbatches=least.get(name, pp) + more, chunks=CHUNKS.get(name, 2))
            for name in SCHEDULES if name != "dualpipe" for more in (0, 1)]


def reordered(given):
    """The same layout in each other order that places its ranks otherwise, where that is allowed."""
    seen = {tuple(axis for axis, n in given.axes.items() if n > 1)}
    for order in map("-".join, permutations(given.order.split("-"))):
        with suppress(ValueError):
            other = replace(given, order=order)
            if (wide := tuple(axis for axis, n in other.axes.items() if n > 1)) not in seen:
                seen.add(wide)
                yield other


def chosen(given):
    """What a layout is a choice of: {(of what, which)}."""
    told = {axis: getattr(given, axis) for axis in ("pp", "dp", "cp", "tp", "ep", "zero", "sp", "order")}
    if given.pp > 1:
        told |= {"schedule": given.kind, "divides": given.microbatches % given.pp == 0}
    if given.tp > 1:
        told["etp"] = given.expert_tp
    return set(told.items())


def pairs(told):
    """All pairs of choices, of different things."""
    told = sorted(told, key=str)  # sets have another order in each process
    return [(a, b) for i, a in enumerate(told) for b in told[i + 1 :] if a[0] != b[0]]


def together(case):
    """The pairs of a case."""
    return pairs({*chosen(case.layout), *((name, getattr(case, name)) for name in FREE)})


def drawn(given, draw, wanted=()):
    """A case of the layout, with what else there is drawn, but for what is wanted."""
    some = FREE | ({"moe": (True,)} if given.spreads else {})
    return Case(given, **{name: dict(wanted).get(name, draw.choice(each)) for name, each in some.items()})


def covering(layouts, seed=0, tries=40):
    """Cases of these layouts and of their other orders, so that each pair of choices that is in any is in one: time
    after time a pair that is left is taken, and of some cases drawn that have it the one that has most of the rest."""
    draw, having = Random(seed), {}
    for each in [other for layout in layouts for other in (layout, *reordered(layout))]:
        some = {(name, one) for name, choices in FREE.items() for one in choices}
        for pair in pairs(chosen(each) | some - {("moe", False)} if each.spreads else chosen(each) | some):
            having.setdefault(pair, []).append(each)
    left, cases = dict.fromkeys(having), []
    while left:
        pair = next(iter(left))
        some = [drawn(draw.choice(having[pair]), draw, pair) for _ in range(tries)]
        cases.append(max(some, key=lambda case: sum(each in left for each in together(case))))
        for each in together(cases[-1]):
            left.pop(each, None)
    return cases
