"""The algorithms of the collectives, seen from above: in each round who sends which elements to whom.

Ranks are numbers, elements are ranges. Rings are those of Patarasuk & Yuan (J. Parallel Distrib. Comput. 69(2), 2009);
doubling, halving, binomial trees and pairwise exchange those of Thakur, Rabenseifner & Gropp (IJHPCA 19(1), 2005); the
dissemination barrier is by Hensgen, Finkel & Manber (Int. J. Parallel Program. 17(1), 1988).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain

Sent = tuple[int, int, range]  # from, to, which elements; a range may be empty
Rounds = Iterator[list[Sent]]


def split(elements: range, parts: int) -> list[range]:
    """`elements` in that many pieces, as torch.tensor_split cuts them: the first of them are longer by one."""
    least, longer = divmod(len(elements), parts)
    ends = list(accumulate((least + (i < longer) for i in range(parts)), initial=elements.start))
    return [range(ends[i], ends[i + 1]) for i in range(parts)]


def ring_reduce_scatter(pieces: list[range]) -> Rounds:
    """Sums go round: piece r starts at rank r + 1 and ends, the sum of all, at rank r."""
    p = len(pieces)
    for step in range(p - 1):
        yield [(r, (r + 1) % p, pieces[(r - 1 - step) % p]) for r in range(p)]


def ring_all_gather(pieces: list[range]) -> Rounds:
    """Copies go round: piece r starts at rank r and ends at rank r − 1, when all have it."""
    p = len(pieces)
    for step in range(p - 1):
        yield [(r, (r + 1) % p, pieces[(r - step) % p]) for r in range(p)]


def ring_all_reduce(x: range, p: int) -> Rounds:
    """Once round to add up, once round to hand out."""
    yield from ring_reduce_scatter(split(x, p))
    yield from ring_all_gather(split(x, p))


def doubling(x: range, p: int) -> Rounds:
    """Partners at distance 1, 2, 4 … exchange all they have: the sums are of 2, 4, 8 … ranks."""
    q = power(p)
    yield from folded(x, p, ([(i, i ^ distance, x) for i in range(q)] for distance in doubled(q)))


def halving(x: range, p: int) -> Rounds:
    """Partners at distance q/2 … 4, 2, 1 give away half of what they have left, then collect the sums on the way back,
    distance 1, 2, 4 …"""
    q = power(p)
    pieces = split(x, q)

    def span(i: int, count: int) -> range:  # of the aligned spans of `count` pieces, that with piece i
        first = i - i % count
        return range(pieces[first].start, pieces[first + count - 1].stop)

    down = ([(i, i ^ d, span(i ^ d, d)) for i in range(q)] for d in reversed(doubled(q)))
    up = ([(i, i ^ d, span(i, d)) for i in range(q)] for d in doubled(q))
    yield from folded(x, p, chain(down, up))


def folded(x: range, p: int, rounds: Iterable[list[Sent]]) -> Rounds:
    """`rounds` among the largest power of 2 of ranks: some that are too many hand theirs to a neighbour before, and get
    the result from it after."""
    extra = p - power(p)
    if extra:
        yield [(2 * i, 2 * i + 1, x) for i in range(extra)]
    yield from among([*range(1, 2 * extra, 2), *range(2 * extra, p)], rounds)
    if extra:
        yield [(2 * i + 1, 2 * i, x) for i in range(extra)]


def up_the_tree(x: range, p: int, root: int = 0) -> Rounds:
    """Sums of 2, 4, 8 … ranks go to the root; distances count from it."""
    for d in doubled(p):
        yield [((v + root) % p, (v - d + root) % p, x) for v in range(d, p, 2 * d)]


def down_the_tree(x: range, p: int, root: int = 0) -> Rounds:
    """The same tree from the root down: 1, 2, 4 … ranks have it."""
    for d in reversed(doubled(p)):
        yield [((v - d + root) % p, (v + root) % p, x) for v in range(d, p, 2 * d)]


def to_one(pieces: list[range], root: int = 0) -> Rounds:
    """Everybody sends its piece to the root."""
    yield [(r, root, piece) for r, piece in enumerate(pieces) if r != root]


def from_one(pieces: list[range], root: int = 0) -> Rounds:
    """The root sends everybody its piece."""
    yield [(root, r, piece) for r, piece in enumerate(pieces) if r != root]


def pairwise(splits: Sequence[Sequence[int]]) -> Rounds:
    """In step s everybody sends to the rank s to the right, so that nobody is sent to by two at once."""
    p = len(splits)
    blocks = [[range(end - count, end) for count, end in zip(row, accumulate(row), strict=True)] for row in splits]
    for step in range(1, p):
        yield [(r, (r + step) % p, blocks[r][(r + step) % p]) for r in range(p)]


def two_level(x: range, p: int, k: int) -> Rounds:
    """Rings inside each node of k ranks, so that it has one sum, a piece a rank; a ring of those of each place across
    the nodes; rings inside again, so that everybody has all pieces."""
    nodes = [range(first, first + k) for first in range(0, p, k)]
    pieces = split(x, k)
    yield from together(among(node, ring_reduce_scatter(pieces)) for node in nodes)
    yield from together(among(range(place, p, k), ring_all_reduce(pieces[place], p // k)) for place in range(k))
    yield from together(among(node, ring_all_gather(pieces)) for node in nodes)


def dissemination(p: int) -> Iterator[list[tuple[int, int]]]:
    """Everybody tells the rank 1, 2, 4 … to the right: in the end all have heard of all."""
    for distance in doubled(p):
        yield [(r, (r + distance) % p) for r in range(p)]


def among(members: Sequence[int], rounds: Iterable[list[Sent]]) -> Rounds:
    """The same rounds with rank `members[i]` in the place of i."""
    for sent in rounds:
        yield [(members[src], members[dst], part) for src, dst, part in sent]


def together(groups: Iterable[Rounds]) -> Rounds:
    """Equally many rounds of several groups, at the same time."""
    for sent in zip(*groups, strict=True):
        yield list(chain.from_iterable(sent))


def power(p: int) -> int:
    """The largest power of 2 that is no more than p."""
    return 1 << (p.bit_length() - 1)


def doubled(p: int) -> list[int]:
    """1, 2, 4 … below p."""
    return [1 << k for k in range((p - 1).bit_length())]
