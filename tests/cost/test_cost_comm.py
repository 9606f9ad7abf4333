"""Bytes, messages and seconds of collectives: the closed forms against the messages themselves, and against published
definitions."""

from dataclasses import replace

import pytest

from shardlab.cost import collective_seconds, transfer_seconds
from shardlab.cost.comm import (
    algbw,
    busbw,
    crossover,
    fastest,
    hops,
    message_count,
    seconds,
    serial_bytes,
    wire,
)
from shardlab.cost.messages import ALGORITHMS, SHARED, messages
from shardlab.specs import LinkSpec, Topology, find_link

LINK = LinkSpec(name="link", per_direction=450e9, alpha=1e-6)
PAIRS = [(op, name) for op, names in ALGORITHMS.items() for name in names if name != "two_level"]
POWERS, SIZES = (1, 2, 4, 8, 16), (0, 1680, 2**20)  # sizes in elements; 1680 divides by all up to 8


def played(op, algorithm, numel, ranks, link=LINK):
    """The messages on `ranks` ranks joined by one kind of link."""
    topology = Topology(nodes=ranks, per_node=1, between=link, nic="rank")
    return transfer_seconds(messages(op, algorithm, numel, 4, ranks), topology)


@pytest.mark.parametrize(("op", "algorithm"), PAIRS)
def test_closed_forms_are_the_times_of_the_messages(op, algorithm):
    for ranks in POWERS:
        for numel in SIZES[1:]:
            assert collective_seconds(op, algorithm, 4 * numel, ranks, LINK) == \
                pytest.approx(played(op, algorithm, numel, ranks), rel=1e-12), (ranks, numel)


@pytest.mark.parametrize(("op", "algorithm"), PAIRS)
def test_and_among_any_number_of_ranks_but_for_trees_and_doubling_which_are_bounded(op, algorithm):
    """Where it is no power of 2, some have nothing to wait for at first, and what they send is there early."""
    for ranks in (3, 5, 6, 7):
        closed, exact = seconds(op, algorithm, 4 * 1680, ranks, LINK), played(op, algorithm, 1680, ranks)
        if algorithm == "tree" or (op, algorithm) == ("all_reduce", "doubling"):
            assert 0.5 * closed < exact <= closed * (1 + 1e-12)
        else:
            assert exact == pytest.approx(closed, rel=1e-12), ranks


@pytest.mark.parametrize(("op", "algorithm"), PAIRS)
def test_a_link_without_alpha_leaves_the_bytes_and_one_without_bytes_the_hops(op, algorithm):
    bare, endless = replace(LINK, alpha=None), LinkSpec(name="endless", per_direction=1e300, alpha=1.0)
    assert seconds(op, algorithm, 6720, 8, bare) == pytest.approx(serial_bytes(op, algorithm, 6720, 8) / 450e9)
    assert seconds(op, algorithm, 6720, 8, endless) == hops(op, algorithm, 8)
    assert seconds(op, algorithm, 6720, 1, LINK) == hops(op, algorithm, 1) == serial_bytes(op, algorithm, 6720, 1) == 0


def test_hops_and_bytes_of_eight_ranks():
    """By Thakur, Rabenseifner & Gropp: 14, 3, 6 and 6 hops of an all-reduce."""
    names = ("ring", "doubling", "halving", "tree", "naive")
    assert [hops("all_reduce", name, 8) for name in names] == [14, 3, 6, 6, 2]
    assert [serial_bytes("all_reduce", name, 1000, 8) for name in names] == [1750, 3000, 1750, 6000, 14000]
    assert [hops("all_reduce", name, 6) for name in names] == [10, 4, 6, 6, 2]
    assert (hops("all_gather", "ring", 8), serial_bytes("all_gather", "ring", 1000, 8)) == (7, 7000)
    assert (hops("reduce_scatter", "ring", 8), serial_bytes("reduce_scatter", "ring", 1000, 8)) == (7, 875)
    assert (hops("barrier", "doubling", 5), serial_bytes("barrier", "doubling", 1000, 5)) == (3, 3)


def test_a_rings_bytes_do_not_grow_with_the_ranks_and_its_hops_do():
    large = [serial_bytes("all_reduce", "ring", 1.0, p) for p in (2, 8, 64, 4096)]
    assert large == sorted(large) and large[0] == 1 and large[-1] < 2
    assert hops("all_reduce", "ring", 4096) == 8190


@pytest.mark.parametrize(("op", "algorithm"), [*PAIRS, ("all_reduce", "two_level")])
def test_what_a_rank_sends_is_what_its_messages_carry(op, algorithm):
    for ranks in range(1, 8):
        numel = 6 * ranks + (0 if op in ("reduce_scatter", "all_to_all", "scatter") else 1)
        keys = dict(per_node=1) if algorithm == "two_level" else {}
        sent = messages(op, algorithm, numel, 2, ranks, **keys)
        for rank in range(ranks):
            mine = [m.nbytes for one in sent for m in one if m.src == rank]
            args = (op, algorithm, numel, 2, ranks, rank)
            assert (wire(*args, **keys), message_count(*args, **keys)) == (sum(mine), len(mine))


def test_wire_by_hand():
    """Seven elements of 4 B on three ranks are pieces of 3, 2, 2: rank 0 sends 2 · 7 − 3 − 2 of them, rank 1 ten."""
    assert [wire("all_reduce", "ring", 7, 4, 3, rank) for rank in range(3)] == [4 * 9, 4 * 10, 4 * 9]
    assert [message_count("all_reduce", "ring", 2, 4, 3, rank) for rank in range(3)] == [2, 3, 3]  # one piece is empty
    assert [wire("broadcast", "tree", 7, 4, 3, rank, root=2) for rank in range(3)] == [0, 0, 56]
    assert [wire("scatter", "naive", 6, 4, 3, rank, root=1) for rank in range(3)] == [0, 16, 0]
    splits = [[5, 1, 0], [0, 0, 2], [1, 1, 1]]
    assert [wire("all_to_all", "pairwise", 0, 4, 3, rank, splits=splits) for rank in range(3)] == [4, 8, 8]
    assert [message_count("all_to_all", "pairwise", 0, 4, 3, rank, splits=splits) for rank in range(3)] == [1, 1, 2]
    assert wire("all_reduce", "two_level", 8, 4, 4, 0, per_node=2) == 4 * (4 + 2 * 2 + 4)


def test_shared_memory_is_written_once():
    """7 elements on 3 ranks: the sum stands where a rank's own piece would, which nobody else reads."""
    assert [wire("all_reduce", "shared", 7, 4, 3, rank) for rank in range(3)] == [28, 28, 28]
    assert [wire("broadcast", "shared", 7, 4, 3, rank, root=1) for rank in range(3)] == [0, 28, 0]
    assert wire("all_gather", "shared", 7, 4, 3, 2) == 28
    assert wire("reduce_scatter", "shared", 6, 4, 3, 2) == 16
    assert wire("barrier", "shared", 6, 4, 3, 0) == 0
    assert [wire(op, "shared", 6, 4, 1, 0) for op in SHARED] == [0] * len(SHARED)
    assert [message_count(op, "shared", 6, 4, 3, 1) for op in SHARED] == [0] * len(SHARED)


def test_few_hops_win_short_messages_and_few_bytes_long_ones():
    """Of eight, one for all has 2 hops and 14 n, doubling 3 and 3 n, halving 6 and 1.75 n, a ring 14 and 1.75 n: it is
    the fastest of seven only, which halving has to fold."""
    assert [fastest("all_reduce", n, 8, LINK) for n in (0, 40_000, 41_000, 1_079_000, 1_081_000, 2**40)] == [
        "naive", "naive", "doubling", "doubling", "halving", "halving"]
    assert fastest("all_reduce", 2**30, 7, LINK) == "ring"
    assert fastest("all_reduce", 2**30, 2, LINK) == "doubling"
    assert fastest("all_reduce", 2**30, 1, LINK) == "ring"  # the first of equals
    assert fastest("all_gather", 5, 8, LINK) == "ring"
    for n in (2**10, 2**20, 2**30):
        times = {name: seconds("all_reduce", name, n, 8, LINK) for name in ALGORITHMS["all_reduce"][:5]}
        assert times[fastest("all_reduce", n, 8, LINK)] == min(times.values())


@pytest.mark.parametrize(("a", "b", "ranks"), [
    ("ring", "doubling", 8), ("doubling", "halving", 8), ("ring", "tree", 16), ("naive", "ring", 4),
    ("halving", "ring", 7),
])
def test_at_the_crossover_both_take_equally_long(a, b, ranks):
    n = crossover("all_reduce", a, b, ranks, LINK)
    assert n == pytest.approx(crossover("all_reduce", b, a, ranks, LINK))

    def gap(nbytes):
        return seconds("all_reduce", a, nbytes, ranks, LINK) - seconds("all_reduce", b, nbytes, ranks, LINK)

    assert gap(n) == pytest.approx(0, abs=1e-15) and gap(n / 2) * gap(2 * n) < 0
    few = min((a, b), key=lambda name: hops("all_reduce", name, ranks))
    assert seconds("all_reduce", few, n / 2, ranks, LINK) < min(
        seconds("all_reduce", name, n / 2, ranks, LINK) for name in (a, b) if name != few)


def test_no_crossover_where_one_is_always_as_good():
    assert crossover("all_reduce", "ring", "halving", 8, LINK) is None  # fewer hops, as few bytes
    assert crossover("all_reduce", "tree", "doubling", 8, LINK) is None
    assert crossover("all_reduce", "ring", "ring", 8, LINK) is None
    assert crossover("all_reduce", "ring", "doubling", 1, LINK) is None


def test_bus_bandwidth_is_a_links_rate_whatever_the_number_of_ranks():
    """nccl-tests' doc/PERFORMANCE.md: the best algorithm on links without α shows the link's own rate."""
    bare = replace(LINK, alpha=None)
    for ranks in (2, 8, 64):
        for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
            took = seconds(op, ALGORITHMS[op][0], 2**20, ranks, bare)
            assert busbw(op, 2**20, ranks, took) == pytest.approx(450e9), (op, ranks)
    assert busbw("broadcast", 100, 8, 2.0) == busbw("reduce", 100, 8, 2.0) == algbw("reduce", 100, 8, 2.0) == 50
    assert busbw("all_reduce", 100, 8, 2.0) == 1.75 * algbw("all_reduce", 100, 8, 2.0) == 87.5
    assert busbw("all_to_all", 100, 8, 2.0) == 0.875 * 50
    assert busbw("all_reduce", 100, 1, 2.0) == 0


def test_an_all_gathers_size_is_the_whole():
    """1 GiB of each of eight ranks in a second: 8 GiB/s, of which 7 are sent; by one rank's part it would be 1."""
    assert algbw("all_gather", 2**30, 8, 1.0) == algbw("gather", 2**30, 8, 1.0) == 8 * 2**30
    assert busbw("all_gather", 2**30, 8, 1.0) == 7 * 2**30
    assert algbw("reduce_scatter", 2**30, 8, 1.0) == algbw("scatter", 2**30, 8, 1.0) == 2**30


@pytest.mark.parametrize(("call", "message"), [
    (lambda: hops("shuffle", "ring", 2), "no collective is known as 'shuffle': use one of all_reduce"),
    (lambda: serial_bytes("all_gather", "tree", 1, 2), "all_gather has no algorithm 'tree': use ring or shared"),
    (lambda: seconds("all_reduce", "two_level", 1, 2, LINK), "'two_level' has no closed form here.*transfers.seconds"),
    (lambda: hops("all_reduce", "shared", 2), "'shared' has no closed form"),
    (lambda: hops("all_reduce", "ring", 0), "ranks must be a whole number of at least 1, not 0"),
    (lambda: seconds("all_reduce", "ring", -1, 2, LINK), "nbytes must be a number of at least 0, not -1"),
    (lambda: seconds("all_reduce", "ring", float("nan"), 2, LINK), "nbytes must be a number of at least 0, not nan"),
    (lambda: crossover("all_reduce", "ring", "doubling", 8, find_link("ethernet-25")),
     "ethernet-25 names no alpha, on which the choice depends: give it one"),
    (lambda: fastest("all_reduce", 1, 8, find_link("ethernet-25")), "ethernet-25 names no alpha"),
    (lambda: fastest("shuffle", 1, 8, LINK), "no collective is known as 'shuffle'"),
    (lambda: algbw("shuffle", 1, 8, 1), "no collective is known as 'shuffle'"),
    (lambda: busbw("barrier", 1, 8, 1), "a barrier moves no bytes"),
    (lambda: busbw("all_reduce", 1, 0, 1), "ranks must be a whole number of at least 1, not 0"),
    (lambda: busbw("all_reduce", 1, 8, 0), "seconds must be a number above 0, not 0"),
    (lambda: algbw("all_reduce", 0, 8, 1), "nbytes must be a number above 0, not 0"),
    (lambda: wire("all_reduce", "ring", 8, 4, 4, 4), "rank = 4 is none of 4 ranks: the last is 3"),
    (lambda: message_count("all_reduce", "ring", 8, 4, 4, -1), "rank must be a whole number of at least 0, not -1"),
    (lambda: wire("scatter", "naive", 7, 4, 4, 0), "numel = 7 does not divide by 4 ranks"),
])
def test_what_has_no_price_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
