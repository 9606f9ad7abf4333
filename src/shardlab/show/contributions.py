"""Whose data a piece holds after each step of a collective: worked out from the messages in its ledgers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ..cost.messages import Message, messages

DRAWN = ("all_reduce", "reduce", "broadcast")  # in place: an offset is where the bytes come from and where they go to


class Sent(NamedTuple):
    """A message: from and to which rank (numbers in the group), and which pieces (`first` up to `last`, exclusive)."""

    src: int
    dst: int
    first: int
    last: int


class Step(NamedTuple):
    """What is sent at once, and whose data each rank's pieces hold after it: `held[rank][piece]` are group numbers."""

    sent: list[Sent]
    held: list[list[frozenset[int]]]


def follow(entries: Sequence[dict]) -> list[Step]:
    """The steps of one all-reduce, reduce or broadcast made of messages, from all its ranks' ledgers (`to_dicts()`).

    A ledger has what a rank sent, in order, but not what it had received by then. So steps are the rounds of
    `cost.messages` for the algorithm that the ledger names, and the ledger must hold exactly their messages. The tensor
    is cut into pieces wherever a message begins or ends. What arrives brings all its ranks' data along: it is added, or
    takes the place of what was there, which is a part of it. Raises ValueError on entries that are not one such
    collective.
    """
    rounds, start = _rounds(entries)
    edges = sorted({edge for sent in rounds for m in sent for edge in (m.offset, m.offset + m.nbytes)})
    held = [[whose] * (len(edges) - 1) for whose in start]
    steps = []
    for one in rounds:
        sent = [Sent(m.src, m.dst, edges.index(m.offset), edges.index(m.offset + m.nbytes)) for m in one]
        before, held = held, [list(pieces) for pieces in held]
        for src, dst, first, last in sent:
            for i in range(first, last):
                held[dst][i] = held[dst][i] | before[src][i]
        steps.append(Step(sent, held))
    return steps


def _rounds(entries: Sequence[dict]) -> tuple[list[list[Message]], list[frozenset[int]]]:
    """The rounds of the collective that the entries are of, and whose data each rank has at first."""
    _check(entries)
    op, algorithm, ranks = entries[0]["op"], entries[0]["algorithm"], list(entries[0]["ranks"])
    numel, p = math.prod(entries[0]["shape"]), len(ranks)
    sent = {ranks.index(e["rank"]): [(ranks.index(m["dst"]), m["nbytes"], m["offset"]) for m in e["messages"]]
            for e in entries}
    for how in _ways(op, algorithm, p):
        rounds = messages(op, algorithm, numel, entries[0]["payload"] // numel, p, **how)
        if all(told == [m[1:] for one in rounds for m in one if m.src == r] for r, told in sent.items()):
            alone = how.get("root", 0) if op == "broadcast" else None
            return rounds, [frozenset({r} if alone in (None, r) else ()) for r in range(p)]
    raise ValueError(f"the ledger's messages are not those of {op} by {algorithm!r} over ranks {ranks}, as "
                     "cost.messages has them: steps draws whole collectives only")


def _ways(op: str, algorithm: str, p: int) -> Iterator[dict[str, Any]]:
    """What the ledger does not name: ranks a node, or the root."""
    if algorithm == "two_level":
        yield from ({"per_node": k} for k in range(1, p + 1) if p % k == 0)
    elif op == "all_reduce":
        yield {}
    else:
        yield from ({"root": root} for root in range(p))


def _check(entries: Sequence[dict]) -> None:
    """ValueError unless the entries are of one collective, of all its ranks, whose messages can be followed."""
    if not entries:
        raise ValueError("an empty ledger has no steps: record a collective, and merge the ledgers of all its ranks")
    first = entries[0]
    if first["op"] not in DRAWN:
        raise ValueError(f"steps draws collectives in place, {', '.join(DRAWN)}: of {first['op']} the ledger does not "
                         "say where in the result the bytes go")
    there, ranks = sorted(e["rank"] for e in entries), sorted(first["ranks"])
    if there != ranks or len({(e["op"], e["algorithm"], tuple(e["ranks"])) for e in entries}) > 1:
        raise ValueError(f"steps draws one collective, with an entry of each of its ranks {ranks}; these are "
                         f"{len(entries)} entries of ranks {there}: {', '.join(sorted({e['op'] for e in entries}))}")
    if not any(e["messages"] for e in entries):
        way = "one rank alone" if len(ranks) == 1 else "no elements" if 0 in first["shape"] else (
            "shared memory" if first["algorithm"] == "shared" else "the backend's own, which tells nothing")
        raise ValueError(f"no messages to draw ({way}): record it among several ranks under comm.use(\"ring\")")
    if any(m["offset"] < 0 for e in entries for m in e["messages"]):
        raise ValueError(f"a message of this {first['op']} has no place in its tensor (offset -1): steps draws those "
                         "that work in place")

