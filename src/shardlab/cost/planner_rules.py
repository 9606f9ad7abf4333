"""Which layouts a planner tries: all that a model and a cluster allow, but for those that a rule leaves out.

Every rule drops layouts that another one, which is tried, is at least as good as, or says what it gives up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ..schedule import CHUNKS
from ..schedule.limits import sized
from ..specs import ClusterSpec, Layout, ModelSpec
from ..specs.layout_check import divisors

RULES = (
    "tp inside a domain: every layer waits for its sums, twice each way",
    "sequence parallelism wherever tp is: it sends as much, and holds less",
    "ZeRO-1 wherever there is a data axis: it sends as much, and holds less; beyond it the lowest stage that fits",
    "no recomputation where it fits without, in full where it does not: selective has next to nothing left to save",
    "sequences are cut over ranks only where whole ones do not fit, or are too few, and into 2,048 tokens or more",
    "no gpipe: 1f1b idles as long, and holds less; interleaved with 2 or 4 stages a rank",
    "micro-batches of 1, 2 or 4 sequences; layers split so that stages compute alike; ranks in the usual order",
)
BATCHES = (1, 2, 4)
SHORTEST = 2048  # tokens a rank: with fewer there is too little attention to hide a ring's messages behind


class Way(NamedTuple):
    """A layout without its micro-batches: `cuts` are the axes that every schedule has in common."""

    cuts: dict[str, Any]
    batch: int
    microbatches: int


def ways(spec: ModelSpec, cluster: ClusterSpec, sequences: int, tp: int, pp: int, cp: int) -> Iterator[Way]:
    """The cuts of the data and expert axes that go with these, for so many sequences a step."""
    dp = cluster.cards // (tp * pp * cp)
    if sequences % dp:
        return
    each = sequences // dp
    for batch in (size for size in BATCHES if each % size == 0):
        for ep, etp in experts(spec, dp * cp, tp):
            cuts = dict(tp=tp, pp=pp, cp=cp, dp=dp, ep=ep, etp=etp, sp="keep" if tp > 1 else False)
            yield Way(cuts, batch, each // batch)


def axes(spec: ModelSpec, cluster: ClusterSpec, seq: int) -> Iterator[tuple[int, int, int]]:
    """tp, pp and cp that divide the cards, cp last and from below."""
    heads = [tp for tp in divisors(cluster.cards) if tp <= cluster.per_domain and _cuts_heads(spec, tp)]
    for tp in heads:
        for pp in (each for each in divisors(cluster.cards // tp) if each <= spec.layers):
            for cp in divisors(cluster.cards // (tp * pp)):
                if cp == 1 or seq >= cp * SHORTEST:
                    yield tp, pp, cp


def experts(spec: ModelSpec, data_ranks: int, tp: int) -> Iterator[tuple[int, int | None]]:
    """ep and etp: experts cut as the layers are, or whole, on as many ranks as share them equally."""
    if spec.experts is None:
        yield 1, None
        return
    for etp in (None, 1) if tp > 1 else (None,):
        sites = data_ranks * tp if etp == 1 else data_ranks
        yield from ((ep, etp) for ep in divisors(sites) if spec.experts.routed % ep == 0)


def schedules(spec: ModelSpec, pp: int, microbatches: int) -> Iterator[dict[str, Any]]:
    """The schedules that are defined for so many ranks and micro-batches; one that says nothing without a pipeline."""
    if pp == 1:
        yield {}
        return
    for name, chunks in (("1f1b", 1), ("interleaved", 2), ("interleaved", 4),
                         *((name, CHUNKS[name]) for name in ("zero_bubble", "dualpipe_v", "dualpipe"))):
        if (pp if name == "dualpipe" else pp * chunks) > spec.layers:
            continue
        try:
            sized(name, pp, microbatches, chunks)
        except ValueError:
            continue
        yield dict(schedule=name, chunks=chunks)


def zeros(cuts: dict[str, Any]) -> tuple[int, ...]:
    """The stages of ZeRO to try, the lowest first."""
    if cuts["dp"] * cuts["cp"] == 1:
        return (0,)
    return (1,) if cuts["pp"] > 1 else (1, 2, 3)


def _cuts_heads(spec: ModelSpec, tp: int) -> bool:
    try:
        Layout(tp).check(spec)
    except ValueError:
        return False
    return True
