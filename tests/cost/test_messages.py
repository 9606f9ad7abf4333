"""The messages of each algorithm, played: what every rank holds in the end, element by element, is what its verb says.

A message takes what its sender held when the round began. To sum is to hold each rank's contribution once: so a message
must either bring contributions that its receiver hasn't got, or the whole sum to one that hasn't got it.
"""

import math
from itertools import chain

import pytest
import torch

from shardlab.cost.messages import ALGORITHMS, SHARED, Message, messages
from shardlab.cost.rounds import split

RANKS, LENGTHS = range(1, 10), (0, 1, 2, 3, 7, 8, 23)
SUMS = ("ring", "doubling", "halving", "tree", "naive")


def elements(message, itemsize):
    assert message.nbytes > 0 and message.nbytes % itemsize == message.offset % itemsize == 0
    return range(message.offset // itemsize, (message.offset + message.nbytes) // itemsize)


def played(sent, held, itemsize=4, complete=None):
    """`held[rank][element]`, a set of contributions, after these rounds. `complete` is what a whole sum is made of."""
    for messages_of_round in sent:
        assert messages_of_round, "a round in which nobody sends"
        assert len({(m.src, m.dst) for m in messages_of_round}) == len(messages_of_round)
        before = [list(row) for row in held]
        for m in messages_of_round:
            assert m.src != m.dst
            for e in elements(m, itemsize):
                brought, has = before[m.src][e], held[m.dst][e]
                assert brought, f"{m} sends what its sender has not got"
                assert has != complete, f"{m} tells what is known"
                assert brought == complete or not brought & has, f"{m} adds the same twice"
                held[m.dst][e] = brought if brought == complete else brought | has
    return held


def own(ranks, numel):
    """Every rank holds its own contribution to every element."""
    return [[{rank} for _ in range(numel)] for rank in range(ranks)]


def total(sent, rank=None):
    return sum(m.nbytes for m in chain.from_iterable(sent) if rank in (None, m.src))


def per_nodes(ranks):
    return [k for k in range(1, ranks + 1) if ranks % k == 0]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("numel", LENGTHS)
def test_an_all_reduce_leaves_everybody_everybodys_contribution_once(ranks, numel):
    everyone = set(range(ranks))
    calls = [(name, None) for name in SUMS] + [("two_level", k) for k in per_nodes(ranks)]
    for algorithm, per_node in calls:
        sent = messages("all_reduce", algorithm, numel, 4, ranks, per_node=per_node)
        assert played(sent, own(ranks, numel), complete=everyone) == [[everyone] * numel] * ranks, algorithm


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("each", [0, 1, 3])
def test_a_reduce_scatter_leaves_each_rank_its_own_piece(ranks, each):
    everyone = set(range(ranks))
    held = played(messages("reduce_scatter", "ring", each * ranks, 4, ranks), own(ranks, each * ranks),
                  complete=everyone)
    for rank in range(ranks):
        assert held[rank][rank * each : (rank + 1) * each] == [everyone] * each


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("each", [0, 1, 3])
def test_an_all_gather_leaves_everybody_every_piece(ranks, each):
    held = [[{"given"} if e // each == rank else set() for e in range(each * ranks)] for rank in range(ranks)]
    played(messages("all_gather", "ring", each, 4, ranks), held, complete={"given"})
    assert held == [[{"given"}] * (each * ranks)] * ranks


@pytest.mark.parametrize("ranks", RANKS)
def test_a_reduce_ends_at_its_root_and_a_broadcast_begins_there(ranks):
    everyone = set(range(ranks))
    for root in range(ranks):
        held = played(messages("reduce", "tree", 5, 2, ranks, root=root), own(ranks, 5), 2, everyone)
        assert held[root] == [everyone] * 5
        held = [[{"given"} if rank == root else set() for _ in range(5)] for rank in range(ranks)]
        played(messages("broadcast", "tree", 5, 2, ranks, root=root), held, 2, {"given"})
        assert held == [[{"given"}] * 5] * ranks


@pytest.mark.parametrize("ranks", RANKS)
def test_a_gather_collects_and_a_scatter_hands_out(ranks):
    for root in range(ranks):
        held = [[{"given"} if e // 3 == rank else set() for e in range(3 * ranks)] for rank in range(ranks)]
        played(messages("gather", "naive", 3, 4, ranks, root=root), held, complete={"given"})
        assert held[root] == [{"given"}] * (3 * ranks)
        held = [[{"given"} if rank == root else set() for _ in range(3 * ranks)] for rank in range(ranks)]
        sent = messages("scatter", "naive", 3 * ranks, 4, ranks, root=root)
        played(sent, held, complete={"given"})
        assert all(held[rank][3 * rank : 3 * rank + 3] == [{"given"}] * 3 for rank in range(ranks))
        assert total(sent) == 3 * 4 * (ranks - 1)


@pytest.mark.parametrize("ranks", RANKS)
def test_an_all_to_all_brings_every_block_to_its_rank_once(ranks):
    even = messages("all_to_all", "pairwise", 2 * ranks, 4, ranks)
    assert even == messages("all_to_all", "pairwise", 0, 4, ranks, splits=[[2] * ranks] * ranks)
    splits = [[(3 * src + 2 * dst) % 4 for dst in range(ranks)] for src in range(ranks)]
    sent = messages("all_to_all", "pairwise", 0, 4, ranks, splits=splits)
    found = {(m.src, m.dst): elements(m, 4) for m in chain.from_iterable(sent)}
    assert sum(len(one) for one in sent) == len(found)
    assert found == {(src, dst): range(sum(row[:dst]), sum(row[: dst + 1])) for src, row in enumerate(splits)
                     for dst in range(ranks) if row[dst] and src != dst}
    for one in sent:  # nobody is sent to by two at once, and nobody sends twice
        assert len({m.src for m in one}) == len({m.dst for m in one}) == len(one)


@pytest.mark.parametrize("ranks", RANKS)
def test_after_a_barrier_everybody_has_heard_of_all(ranks):
    sent = messages("barrier", "doubling", 999, 8, ranks)
    assert len(sent) == math.ceil(math.log2(ranks))
    heard = [{rank} for rank in range(ranks)]
    for one in sent:
        before = [set(row) for row in heard]
        for m in one:
            assert (m.nbytes, m.offset) == (1, -1)
            heard[m.dst] |= before[m.src]
    assert heard == [set(range(ranks))] * ranks


def test_a_ring_of_three_by_hand():
    """Five elements of 2 B are pieces of 2, 2 and 1: at 0, 4 and 8 B."""
    a, b, c = (4, 0), (4, 4), (2, 8)
    assert messages("all_reduce", "ring", 5, 2, 3) == [
        [Message(0, 1, *c), Message(1, 2, *a), Message(2, 0, *b)],
        [Message(0, 1, *b), Message(1, 2, *c), Message(2, 0, *a)],
        [Message(0, 1, *a), Message(1, 2, *b), Message(2, 0, *c)],
        [Message(0, 1, *c), Message(1, 2, *a), Message(2, 0, *b)],
    ]


def test_six_ranks_double_and_halve_by_hand():
    """0 and 2 go to 1 and 3; 1, 3, 4, 5 are numbers 0 to 3."""
    fold, unfold = [Message(0, 1, 12, 0), Message(2, 3, 12, 0)], [Message(1, 0, 12, 0), Message(3, 2, 12, 0)]
    x = (12, 0)
    assert messages("all_reduce", "doubling", 12, 1, 6) == [
        fold, [Message(1, 3, *x), Message(3, 1, *x), Message(4, 5, *x), Message(5, 4, *x)],
        [Message(1, 4, *x), Message(3, 5, *x), Message(4, 1, *x), Message(5, 3, *x)], unfold]
    low, high, q = (6, 0), (6, 6), [(3, 0), (3, 3), (3, 6), (3, 9)]
    assert messages("all_reduce", "halving", 12, 1, 6) == [
        fold, [Message(1, 4, *high), Message(3, 5, *high), Message(4, 1, *low), Message(5, 3, *low)],
        [Message(1, 3, *q[1]), Message(3, 1, *q[0]), Message(4, 5, *q[3]), Message(5, 4, *q[2])],
        [Message(1, 3, *q[0]), Message(3, 1, *q[1]), Message(4, 5, *q[2]), Message(5, 4, *q[3])],
        [Message(1, 4, *low), Message(3, 5, *low), Message(4, 1, *high), Message(5, 3, *high)], unfold]


def test_trees_and_one_for_all_by_hand():
    x = (1, 0)
    assert messages("reduce", "tree", 1, 1, 5, root=3) == [
        [Message(4, 3, *x), Message(1, 0, *x)], [Message(0, 3, *x)], [Message(2, 3, *x)]]
    assert messages("broadcast", "tree", 1, 1, 5, root=3) == [
        [Message(3, 2, *x)], [Message(3, 0, *x)], [Message(3, 4, *x), Message(0, 1, *x)]]
    assert messages("all_reduce", "tree", 1, 1, 3) == [
        [Message(1, 0, *x)], [Message(2, 0, *x)], [Message(0, 2, *x)], [Message(0, 1, *x)]]
    assert messages("all_reduce", "naive", 1, 1, 3) == [
        [Message(1, 0, *x), Message(2, 0, *x)], [Message(0, 1, *x), Message(0, 2, *x)]]


def test_two_nodes_of_two_by_hand():
    """Halves are exchanged inside the nodes, quarters go across, each half among two."""
    sent = messages("all_reduce", "two_level", 4, 1, 4, per_node=2)
    inside, quarter = (2, 0), (1, 0)
    assert sent[0] == [Message(0, 1, 2, 2), Message(1, 0, *inside), Message(2, 3, 2, 2), Message(3, 2, *inside)]
    assert sent[1] == [Message(0, 2, 1, 1), Message(2, 0, *quarter), Message(1, 3, 1, 3), Message(3, 1, 1, 2)]
    assert [{(m.src, m.dst) for m in one} for one in sent[2:]] == [
        {(0, 2), (2, 0), (1, 3), (3, 1)}, {(0, 1), (1, 0), (2, 3), (3, 2)}]
    across = [m for one in sent for m in one if m.src // 2 != m.dst // 2]
    assert sum(m.nbytes for m in across) == 2 * 4  # a ring of four sends 2 · 3/4 · 4 over each of two such links: 12


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("numel", LENGTHS)
def test_totals(ranks, numel):
    """Rings, trees and one for all send 2 (p − 1) n in all, and so does halving; doubling sends n a rank and round."""
    ring = messages("all_reduce", "ring", numel, 4, ranks)
    pieces = [len(piece) * 4 for piece in split(range(numel), ranks)]
    for rank in range(ranks):
        assert total(ring, rank) == (2 * numel * 4 - pieces[rank] - pieces[(rank + 1) % ranks]) * (ranks > 1)
        if numel % ranks == 0:
            assert total(ring, rank) == 2 * (ranks - 1) / ranks * numel * 4
    q = 2 ** int(math.log2(ranks))
    n = numel * 4
    assert {name: total(messages("all_reduce", name, numel, 4, ranks)) for name in SUMS} == {
        "ring": 2 * (ranks - 1) * n, "tree": 2 * (ranks - 1) * n, "naive": 2 * (ranks - 1) * n,
        "halving": 2 * (q - 1) * n + 2 * (ranks - q) * n, "doubling": (q * int(math.log2(q)) + 2 * (ranks - q)) * n}
    for k in per_nodes(ranks):
        m = ranks // k
        assert total(messages("all_reduce", "two_level", numel, 4, ranks, per_node=k)) == 2 * m * (k - 1) * n + \
            2 * (m - 1) * n


@pytest.mark.parametrize("ranks", RANKS)
def test_pieces_are_those_of_tensor_split(ranks):
    for numel in LENGTHS:
        whole = torch.arange(numel) + 5
        assert [list(piece) for piece in split(range(5, 5 + numel), ranks)] == \
            [piece.tolist() for piece in whole.tensor_split(ranks)]


def test_shared_memory_sends_no_messages():
    assert [messages(op, "shared", 8, 4, 4) for op in SHARED] == [[]] * len(SHARED)


def test_one_rank_sends_nothing_and_neither_does_nothing():
    for op, names in ALGORITHMS.items():
        for name in names:
            assert messages(op, name, 8, 4, 1, per_node=1) == []
            assert messages(op, name, 0, 4, 4, per_node=2) == [] or op == "barrier"


@pytest.mark.parametrize(("args", "keys", "message"), [
    (("shuffle", "ring", 1, 1, 2), {}, "no collective is known as 'shuffle': use one of all_reduce, all_gather"),
    (("all_gather", "tree", 1, 1, 2), {}, "all_gather has no algorithm 'tree': use ring or shared"),
    (("gather", "shared", 1, 1, 2), {}, "gather has no algorithm 'shared': use naive$"),
    (("all_reduce", "ring", -1, 1, 2), {}, "numel must be a whole number of at least 0, not -1"),
    (("all_reduce", "ring", 1.5, 1, 2), {}, "numel must be a whole number"),
    (("all_reduce", "ring", 1, 0, 2), {}, "itemsize must be a whole number of at least 1, not 0"),
    (("all_reduce", "ring", 1, 1, 0), {}, "ranks must be a whole number of at least 1, not 0"),
    (("broadcast", "tree", 1, 1, 4), dict(root=4), "root = 4 is none of 4 ranks: the last is 3"),
    (("broadcast", "tree", 1, 1, 4), dict(root=-1), "root must be a whole number of at least 0, not -1"),
    (("reduce_scatter", "ring", 10, 1, 4), {}, "numel = 10 does not divide by 4 ranks; pad it to 12"),
    (("reduce_scatter", "shared", 10, 1, 4), {}, "numel = 10 does not divide by 4 ranks; pad it to 12"),
    (("all_to_all", "pairwise", 10, 1, 4), {}, "numel = 10 does not divide"),
    (("scatter", "naive", 10, 1, 4), {}, "scatter hands out equal pieces: numel = 10 does not divide"),
    (("all_reduce", "two_level", 10, 1, 4), {}, "per_node = None does not divide 4 ranks"),
    (("all_reduce", "two_level", 10, 1, 4), dict(per_node=3), "per_node = 3 does not divide 4 ranks"),
    (("all_reduce", "two_level", 10, 1, 4), dict(per_node=0), "per_node must be a whole number of at least 1, not 0"),
    (("all_gather", "ring", 1, 1, 2), dict(splits=[[1, 1], [1, 1]]), "splits are for an all_to_all, not for all_g"),
    (("all_to_all", "pairwise", 0, 1, 2), dict(splits=[[1, 1]]), r"splits must be 2 × 2, .* not 1 × \[2\]"),
    (("all_to_all", "pairwise", 0, 1, 2), dict(splits=[[1], [1, 2]]), r"splits must be 2 × 2, .* not 2 × \[1, 2\]"),
    (("all_to_all", "pairwise", 0, 1, 2), dict(splits=[[1, -1], [1, 2]]), "splits must be a whole number of at"),
])
def test_what_cannot_be_sent_is_refused(args, keys, message):
    with pytest.raises(ValueError, match=message):
        messages(*args, **keys)
