"""Redundant experts: every load is carried, the busiest rank is light, and what doesn't divide is refused."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.specs.placement import Placement, place, plain


def zipf(exponent, experts, seed):
    """Loads that fall with their order's power, dealt out to the experts at random."""
    load = [(i + 1) ** -exponent for i in range(experts)]
    random.Random(seed).shuffle(load)
    return load


@settings(deadline=None, max_examples=60)
@given(exponent=st.floats(0, 1), ranks=st.integers(1, 24), per=st.integers(5, 16), seed=st.integers(0, 99))
def test_a_quarter_more_experts_make_zipfs_load_even(exponent, ranks, per, seed):
    slots = ranks * per
    load = zipf(exponent, -(-slots * 4 // 5), seed)
    assert place(load, ranks, slots).skew(load) <= 1.1


@settings(deadline=None, max_examples=60)
@given(load=st.lists(st.one_of(st.just(0.0), st.floats(0, 1e6), st.integers(0, 9)), min_size=1, max_size=40),
       ranks=st.integers(1, 8), more=st.integers(0, 3))
def test_never_worse_than_without_them(load, ranks, more):
    """Every expert has a slot, ranks have equally many, and what they do adds up to what there is to do."""
    load += [1.0] * (-len(load) % ranks)
    single, placed = place(load, ranks, len(load)), place(load, ranks, len(load) + more * ranks)
    rounding = 1 + 1e-12
    assert placed.skew(load) <= single.skew(load) * rounding
    assert single.skew(load) <= plain(len(load), ranks).skew(load) * rounding
    assert set(placed.copies) == set(range(len(load)))
    assert {len(rank) for rank in placed.slots} == {len(load) // ranks + more}
    assert sum(placed.loads(load)) == pytest.approx(sum(load))


@settings(deadline=None, max_examples=40)
@given(nodes=st.integers(1, 4), groups_a_node=st.integers(1, 3), size=st.integers(2, 4), ranks=st.integers(1, 3),
       seed=st.integers(0, 99), data=st.data())
def test_a_token_of_n_groups_reaches_n_nodes(nodes, groups_a_node, size, ranks, seed, data):
    groups = nodes * groups_a_node
    load = zipf(1.0, groups * size, seed)
    placed = place(load, nodes * ranks, nodes * ranks * groups_a_node * size, groups=groups, nodes=nodes)
    chosen = data.draw(st.sets(st.integers(0, groups - 1), min_size=1))
    assert placed.reached(g * size + i for g in chosen for i in range(size)) <= len(chosen)
    for g in range(groups):
        assert placed.reached(range(g * size, (g + 1) * size)) == 1
    if groups_a_node * size % ranks:
        return
    single = place(load, nodes * ranks, groups * size, groups=groups, nodes=nodes)
    assert placed.skew(load) <= single.skew(load) * (1 + 1e-12)


def test_deepseek_v3s_prefill_has_32_redundant_experts():
    """Nine a rank on 32 ranks, arXiv:2412.19437, §3.4.1: under Zipf's load the busiest has a thousandth more to do."""
    load = zipf(1.0, 256, 0)
    assert plain(256, 32).skew(load) > 3
    placed = place(load, 32, 288)
    assert {len(rank) for rank in placed.slots} == {9} and placed.skew(load) < 1.01
    inside = place(load, 32, 288, groups=8, nodes=4)
    assert placed.skew(load) < inside.skew(load) < plain(256, 32).skew(load)


def test_by_hand():
    """Two of three loads on one expert: it gets the fourth slot, and each rank has half of all."""
    placed = place([4.0, 1.0, 1.0], 2, 4)
    assert placed.slots == ((0, 1), (0, 2)) and placed.loads([4.0, 1.0, 1.0]) == [3.0, 3.0]
    assert (placed.skew([4.0, 1.0, 1.0]), placed.skew([0.0] * 3)) == (1.0, 1.0)
    assert plain(6, 3).slots == ((0, 1), (2, 3), (4, 5))
    assert place([7.0, 6.0, 5.0, 4.0], 2, 4).loads([7.0, 6.0, 5.0, 4.0]) == [11.0, 11.0]


def test_swaps_mend_what_packing_leaves():
    """Heaviest first leaves 8 + 5 + 1 on one rank and 7 + 6 + 3 on the other; 8 + 6 + 1 and 7 + 5 + 3 are even."""
    load = [8.0, 7.0, 6.0, 5.0, 3.0, 1.0]
    assert place(load, 2, 6).skew(load) == 1.0


@pytest.mark.parametrize(("arguments", "message"), [
    (([1.0] * 6, 4, 6), "6 slots do not divide over 4 ranks"),
    (([1.0] * 6, 2, 4), "4 slots are fewer than 6 experts"),
    (([1.0, -1.0], 2, 2), "load must hold numbers of at least 0"),
    (([], 2, 2), "load must hold numbers of at least 0"),
    (([1.0, float("nan")], 2, 2), "load must hold numbers of at least 0"),
    (([1.0] * 6, 0, 6), "ranks must be a whole number of at least 1, not 0"),
    (([1.0] * 6, 2, 6, 4, 2), "6 experts do not divide over 4 groups"),
    (([1.0] * 6, 2, 6, 3, 2), "3 groups do not divide over 2 nodes"),
    (([1.0] * 6, 3, 6, 2, 2), "3 ranks do not divide over 2 nodes"),
    (([1.0] * 6, 2, 6, 1, 2), "1 groups do not divide over 2 nodes"),
])
def test_refused_with_the_numbers(arguments, message):
    load, ranks, slots, groups, nodes = (*arguments, 1, 1)[:5]
    with pytest.raises(ValueError, match=message):
        place(load, ranks, slots, groups=groups, nodes=nodes)


def test_what_is_no_placement_is_refused():
    with pytest.raises(ValueError, match="expert 1 of 3 has no slot"):
        Placement(((0,), (2,)), 3)
    with pytest.raises(ValueError, match=r"ranks have \[1, 2\] slots"):
        Placement(((0,), (1, 2)), 3)
    with pytest.raises(ValueError, match="load has 2 numbers, and there are 3 experts"):
        plain(3, 3).loads([1.0, 2.0])
    with pytest.raises(ValueError, match="7 experts do not divide over 2 ranks"):
        plain(7, 2)


def test_an_order_that_is_even_already_is_not_made_worse():
    """Packing and swaps would end with 24 against 22: neither is kept."""
    load = [5.0, 5.0, 8.0, 5.0, 9.0, 3.0, 3.0, 8.0]
    assert max(plain(8, 2).loads(load)) == 23
    assert max(place(load, 2, 8).loads(load)) == 23
