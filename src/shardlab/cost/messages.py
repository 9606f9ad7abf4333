"""Each algorithm of a collective as the messages that it sends, round by round, seen from above.

`comm.algorithms` has the same from the view of one rank. Here a round is what all ranks do at once. That is enough to
count bytes and messages (`cost.comm`), to price them on any links (`cost.transfers`), and to hold a run against.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from ..specs.check import whole
from . import rounds

# what there is for each verb, without "shared", whose ranks send no messages; the first is the usual one
ALGORITHMS = {
    "all_reduce": ("ring", "doubling", "halving", "tree", "naive", "two_level"), "all_gather": ("ring",),
    "reduce_scatter": ("ring",), "all_to_all": ("pairwise",), "broadcast": ("tree",), "reduce": ("tree",),
    "gather": ("naive",), "scatter": ("naive",), "barrier": ("doubling",),
}
SHARED = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier")


class Message(NamedTuple):
    """`nbytes` bytes from rank `src` to rank `dst` of a group, never 0.

    `offset` is where the first of them stands, in bytes, in the whole tensor of the collective: what an all-gather or
    gather puts together, what a scatter hands out, what every rank hands to another verb (the sender's, in an
    all-to-all). −1 for the byte of a barrier, which is of no tensor.
    """

    src: int
    dst: int
    nbytes: int
    offset: int


def messages(op: str, algorithm: str, numel: int, itemsize: int, ranks: int, *, per_node: int | None = None,
             root: int = 0, splits: Sequence[Sequence[int]] | None = None) -> list[list[Message]]:
    """The messages of one collective among `ranks` ranks, a list for each round in which somebody sends.

    `numel` elements of `itemsize` bytes are what one rank hands in (to a scatter: the root); a barrier ignores both.
    "two_level" needs `per_node`, ranks a node; `root` is of broadcast, reduce, gather and scatter; `splits[r][q]`, for
    an uneven all_to_all, how many elements r has for q, whatever `numel` is. "shared" sends nothing. Raises ValueError
    on an algorithm that the verb hasn't got, on sizes that are none, and on those that don't divide where they must.
    """
    _check(op, algorithm, numel, ranks, per_node, root, splits)
    size = whole("itemsize", itemsize)
    if op == "barrier" and algorithm != "shared":
        return [[Message(src, dst, 1, -1) for src, dst in sent] for sent in rounds.dissemination(ranks)]
    all_rounds = _rounds(op, algorithm, range(numel), ranks, per_node or ranks, root, splits)
    told = ([Message(src, dst, len(part) * size, part.start * size) for src, dst, part in sent if part]
            for sent in all_rounds)
    return [sent for sent in told if sent]


def _rounds(op: str, algorithm: str, x: range, p: int, per_node: int, root: int,
            splits: Sequence[Sequence[int]] | None) -> rounds.Rounds:
    match op, algorithm:
        case _, "shared":
            return iter(())
        case "all_reduce", "ring":
            return rounds.ring_all_reduce(x, p)
        case "all_reduce", "doubling":
            return rounds.doubling(x, p)
        case "all_reduce", "halving":
            return rounds.halving(x, p)
        case "all_reduce", "tree":
            return chain(rounds.up_the_tree(x, p), rounds.down_the_tree(x, p))
        case "all_reduce", "naive":
            return chain(rounds.to_one([x] * p), rounds.from_one([x] * p))
        case "all_reduce", _:
            return rounds.two_level(x, p, per_node)
        case "reduce_scatter", _:
            return rounds.ring_reduce_scatter(rounds.split(x, p))
        case "all_gather", _:
            return rounds.ring_all_gather(rounds.split(range(p * len(x)), p))
        case "all_to_all", _:
            return rounds.pairwise(splits or [[len(x) // p] * p] * p)
        case "reduce", _:
            return rounds.up_the_tree(x, p, root)
        case "broadcast", _:
            return rounds.down_the_tree(x, p, root)
        case "gather", _:
            return rounds.to_one(rounds.split(range(p * len(x)), p), root)
        case _:
            return rounds.from_one(rounds.split(x, p), root)


def known(op: str, algorithm: str | None = None) -> None:
    """ValueError unless there is such a verb, and it has that algorithm."""
    if op not in ALGORITHMS:
        raise ValueError(f"no collective is known as {op!r}: use one of {', '.join(ALGORITHMS)}")
    of_verb = [*ALGORITHMS[op], *(["shared"] if op in SHARED else [])]
    if algorithm not in (None, *of_verb):
        raise ValueError(f"{op} has no algorithm {algorithm!r}: use {' or '.join(of_verb)}")


def _check(op: str, algorithm: str, numel: int, ranks: int, per_node: int | None, root: int,
           splits: Sequence[Sequence[int]] | None) -> None:
    known(op, algorithm)
    whole("numel", numel, least=0)
    whole("ranks", ranks)
    if whole("root", root, least=0) >= ranks:
        raise ValueError(f"root = {root} is none of {ranks} ranks: the last is {ranks - 1}")
    if algorithm == "two_level" and (per_node is None or ranks % whole("per_node", per_node)):
        raise ValueError(f"two levels need equally many ranks on each node: per_node = {per_node} does not divide "
                         f"{ranks} ranks")
    if splits is not None:
        if op != "all_to_all":
            raise ValueError(f"splits are for an all_to_all, not for {op}")
        if len(splits) != ranks or any(len(row) != ranks for row in splits):
            raise ValueError(f"splits must be {ranks} × {ranks}, a row for each sender, not "
                             f"{len(splits)} × {sorted({len(row) for row in splits})}")
        for row in splits:
            for count in row:
                whole("splits", count, least=0)
    elif op in ("reduce_scatter", "all_to_all", "scatter") and numel % ranks:
        raise ValueError(f"{op} hands out equal pieces: numel = {numel:,} does not divide by {ranks} ranks; pad it to "
                         f"{-(-numel // ranks) * ranks:,}")
