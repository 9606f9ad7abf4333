"""What a collective costs: bytes and messages, exactly, and seconds by the α–β model, for each algorithm.

In Hockney's model (Parallel Computing 20(3), 1994) a message of b bytes takes α + b/β. The closed forms are those of
Thakur, Rabenseifner & Gropp (IJHPCA 19(1), 2005) and of Patarasuk & Yuan (J. Parallel Distrib. Comput. 69(2), 2009), in
which adding up takes no time. They assume one kind of link between all ranks, which each sends and receives on at the
same time, and sizes that divide into equal pieces; `transfers.seconds` says the same of the messages themselves, and
needs no such assumption. Everywhere `nbytes` is what one rank hands in: to an all-gather, its own part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..specs import LinkSpec
from ..specs.check import number, whole
from .messages import ALGORITHMS, Message, known, messages
from .rounds import doubled, power


def wire(op: str, algorithm: str, numel: int, itemsize: int, ranks: int, rank: int, *, per_node: int | None = None,
         root: int = 0, splits: Sequence[Sequence[int]] | None = None) -> int:
    """Bytes that `rank` of a group sends in one collective, exactly: those of its `messages`, which takes and raises
    the same. Of "shared", bytes that it writes into the shared memory: all it hands in, but of a reduce-scatter not its
    own piece, which no other rank reads (of an all-reduce the sum stands there), and of a broadcast the root alone."""
    sent = _sent(op, algorithm, numel, itemsize, ranks, rank, per_node, root, splits)
    if algorithm != "shared":
        return sum(message.nbytes for message in sent)
    silent = ranks == 1 or op == "barrier" or (op == "broadcast" and rank != root)
    return 0 if silent else (numel - (numel // ranks if op == "reduce_scatter" else 0)) * itemsize


def message_count(op: str, algorithm: str, numel: int, itemsize: int, ranks: int, rank: int, *,
                  per_node: int | None = None, root: int = 0, splits: Sequence[Sequence[int]] | None = None) -> int:
    """Messages that `rank` sends in one collective, exactly; arguments and errors as in `wire`."""
    return len(_sent(op, algorithm, numel, itemsize, ranks, rank, per_node, root, splits))


def hops(op: str, algorithm: str, ranks: int) -> int:
    """Messages that follow one another: what each costs, α, is paid so many times. Raises ValueError on an algorithm
    that the verb hasn't got, and on one without a closed form: "two_level", "shared"."""
    return _form(op, algorithm, ranks)[0]


def serial_bytes(op: str, algorithm: str, nbytes: float, ranks: int) -> float:
    """Bytes that follow one another where one rank hands in `nbytes`: what each costs, 1/β, is paid so many times.

    2 (p−1)/p · nbytes for an all-reduce in a ring, where it is also what a rank sends (on average, where it doesn't
    divide). A barrier's are a byte a hop. Raises ValueError like `hops`, and on fewer than 0 bytes.
    """
    if isinstance(nbytes, bool) or not 0 <= nbytes < float("inf"):
        raise ValueError(f"nbytes must be a number of at least 0, not {nbytes!r}")
    return _form(op, algorithm, ranks)[1] * (1 if op == "barrier" else nbytes)


def seconds(op: str, algorithm: str, nbytes: float, ranks: int, link: LinkSpec) -> float:
    """Seconds of one collective: `hops` · α + `serial_bytes` / β, where a link without `alpha` has α = 0.

    For trees and doubling among a number of ranks that is no power of 2 this is a bound from above: some of them send
    before the others need it. Raises ValueError like `serial_bytes`.
    """
    latency = hops(op, algorithm, ranks) * (link.alpha or 0.0)
    return latency + serial_bytes(op, algorithm, nbytes, ranks) / link.per_direction


def crossover(op: str, a: str, b: str, ranks: int, link: LinkSpec) -> float | None:
    """The bytes handed in by one rank at which algorithms `a` and `b` take equally long: with fewer, that of fewer hops
    is faster, with more, that of fewer bytes. None where one is as good or better at every size.

    Raises ValueError like `hops`, and on a link without `alpha`.
    """
    (hops_a, share_a), (hops_b, share_b) = _form(op, a, ranks), _form(op, b, ranks)
    if (hops_a - hops_b) * (share_b - share_a) <= 0:
        return None
    return (hops_a - hops_b) * _alpha(link) * link.per_direction / (share_b - share_a)


def fastest(op: str, nbytes: float, ranks: int, link: LinkSpec) -> str:
    """The verb's algorithm that takes the fewest `seconds`, the first named of equals, without "two_level".

    So NCCL chooses, which predicts each of its own from tables of latencies and bandwidths (src/graph/tuning.cc). Here
    the α of messages to one rank overlap, so that "naive" wins short ones; it would not where a rank has work to do for
    each (the o of LogP, Culler et al., PPoPP 1993). Raises ValueError like `seconds`, and on a link without `alpha`.
    """
    _alpha(link)
    known(op)
    return min((name for name in ALGORITHMS[op] if (op, name) in _FORMS),
               key=lambda name: seconds(op, name, nbytes, ranks, link))


def algbw(op: str, nbytes: float, ranks: int, seconds: float) -> float:
    """Algorithm bandwidth in B/s, as nccl-tests defines it (doc/PERFORMANCE.md): size over time.

    Its size is the whole tensor: for an all-gather and a gather that is `ranks` times the `nbytes` that one rank hands
    in. Take one rank's, and 8 cards look 8 times slower than they are. Raises ValueError on sizes that are none and on
    a barrier, which has no bytes.
    """
    known(op)
    if op == "barrier":
        raise ValueError("a barrier moves no bytes: it has a time, and no bandwidth")
    ranks = whole("ranks", ranks)
    size = number("nbytes", nbytes) * (ranks if op in ("all_gather", "gather") else 1)
    return size / number("seconds", seconds)


def busbw(op: str, nbytes: float, ranks: int, seconds: float) -> float:
    """Bus bandwidth in B/s, as nccl-tests defines it (doc/PERFORMANCE.md): `algbw` times what the best algorithm has to
    send over each rank's link for each byte of its size, so that it compares with a link's rate whatever the number of
    ranks: 2 (p−1)/p for an all-reduce, 1 for broadcast and reduce, (p−1)/p else. Raises like `algbw`."""
    speed = algbw(op, nbytes, ranks, seconds)
    moved = {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0, "reduce": 1.0}
    return speed * moved.get(op, (ranks - 1) / ranks)


# hops, and bytes one after another for each byte handed in, among p ranks
_Form = Callable[[int], tuple[int, float]]


def _folds(p: int) -> int:
    """Two more exchanges, before and after, where p is no power of 2."""
    return 0 if p == power(p) else 2


def _levels(p: int) -> int:
    """⌈log₂ p⌉."""
    return len(doubled(p))


def _doubling(p: int) -> tuple[int, float]:
    rounds = _levels(power(p)) + _folds(p)
    return rounds, rounds


def _halving(p: int) -> tuple[int, float]:
    q = power(p)
    return 2 * _levels(q) + _folds(p), 2 * (q - 1) / q + _folds(p)


_FORMS: dict[tuple[str, str], _Form] = {
    ("all_reduce", "ring"): lambda p: (2 * (p - 1), 2 * (p - 1) / p),
    ("all_reduce", "doubling"): _doubling,
    ("all_reduce", "halving"): _halving,
    ("all_reduce", "tree"): lambda p: (2 * _levels(p), 2 * _levels(p)),
    ("all_reduce", "naive"): lambda p: (2 * (p > 1), 2 * (p - 1)),  # all at once, but through one rank's link
    ("all_gather", "ring"): lambda p: (p - 1, p - 1),
    ("reduce_scatter", "ring"): lambda p: (p - 1, (p - 1) / p),
    ("all_to_all", "pairwise"): lambda p: (p - 1, (p - 1) / p),
    ("broadcast", "tree"): lambda p: (_levels(p), _levels(p)),
    ("reduce", "tree"): lambda p: (_levels(p), _levels(p)),
    ("gather", "naive"): lambda p: (int(p > 1), p - 1),
    ("scatter", "naive"): lambda p: (int(p > 1), (p - 1) / p),
    ("barrier", "doubling"): lambda p: (_levels(p), _levels(p)),
}


def _form(op: str, algorithm: str, ranks: int) -> tuple[int, float]:
    known(op, algorithm)
    if (op, algorithm) not in _FORMS:
        raise ValueError(f"{algorithm!r} has no closed form here, whose links are all alike: price its messages on a "
                         "Topology with transfers.seconds (\"shared\" sends none)")
    return _FORMS[op, algorithm](whole("ranks", ranks))


def _alpha(link: LinkSpec) -> float:
    if link.alpha is None:
        raise ValueError(f"{link.name} names no alpha, on which the choice depends: give it one, "
                         "dataclasses.replace(link, alpha=5e-6), or fit one to measured times (cost.fit)")
    return link.alpha


def _sent(op: str, algorithm: str, numel: int, itemsize: int, ranks: int, rank: int, per_node: int | None, root: int,
          splits: Sequence[Sequence[int]] | None) -> list[Message]:
    rounds = messages(op, algorithm, numel, itemsize, ranks, per_node=per_node, root=root, splits=splits)
    if whole("rank", rank, least=0) >= ranks:
        raise ValueError(f"rank = {rank} is none of {ranks} ranks: the last is {ranks - 1}")
    return [message for sent in rounds for message in sent if message.src == rank]
