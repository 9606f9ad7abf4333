"""The matrix: under every layout that `Layout` accepts the cut model trains as the plain one does, in float64.

For 4 ranks all of them, for 8 a covering set: loss, gradients, norm, the experts' loads, and the parameters after three
clipped steps, on every rank. See `layouts` for the models and the batches.
"""

from random import Random

import layouts
import pytest
from layout_cases import FREE, Case, accepted, covering, drawn, reordered, together
from layouts import parity

from shardlab.specs import Layout

# how many there are: a refusal that creeps in, or is lost, is to be seen
COUNTS = {1: 1, 2: 34, 4: 330, 8: 1447}
ORDERS = {2: 0, 4: 201, 8: 1947}


@pytest.mark.parametrize("ranks", COUNTS)
def test_there_are_so_many_layouts(ranks):
    some = list(accepted(ranks))
    assert len(set(map(repr, some))) == len(some) == COUNTS[ranks]
    assert {each.world_size for each in some} == {ranks}
    if ranks in ORDERS:
        assert sum(len(list(reordered(each))) for each in some) == ORDERS[ranks]


def test_the_layouts_have_all_that_there_is():
    """Each value of each field is in one, and each two fields' values together where they may be."""
    some = list(accepted(4))
    assert {each.schedule for each in some} == {None, "gpipe", "1f1b", "interleaved", "zero_bubble", "dualpipe_v"}
    for schedule in ("gpipe", "1f1b", "zero_bubble", "dualpipe_v"):
        for pp in (2, 4):
            assert {each.microbatches % pp == 0 for each in some if (each.schedule, each.pp) == (schedule, pp)} == {
                True, False}
    for pp in (2, 4):  # which interleaved 1F1B works in rounds of
        assert {each.microbatches % pp for each in some if (each.schedule, each.pp) == ("interleaved", pp)} == {0}
    assert {(each.zero, each.pp > 1) for each in some} == {(stage, False) for stage in range(4)} | {
        (0, True), (1, True)}
    assert {(each.sp, each.zero) for each in some if each.tp == each.data_ranks == 2} == {
        (sp, stage) for sp in (False, "keep", "again") for stage in range(4)}
    assert {(each.ep, each.expert_tp) for each in some if each.tp == each.dp == 2} == {(1, 1), (1, 2), (2, 1), (2, 2),
                                                                                     (4, 1)}


@pytest.mark.parametrize("ranks", [4, 8])
def test_a_covering_set_has_every_pair_that_any_case_has(ranks):
    """The same whatever order Python's sets have."""
    some = covering(list(accepted(ranks)))
    pairs = set().union(*(together(case) for case in some))
    draw = Random(1)
    every = list(accepted(ranks))
    for _ in range(200):
        assert pairs.issuperset(together(drawn(draw.choice(every), draw)))
    assert len(some) < 90
    assert all({getattr(case, name) for case in some} == set(choices) for name, choices in FREE.items())


def test_a_covering_part_of_four_ranks(pool):
    parity(pool, covering(list(accepted(4))))


@pytest.mark.more
def test_every_layout_of_four_ranks(pool):
    """Each with what else there is drawn, and a fifth of them in another order of the axes."""
    draw, every = Random(0), list(accepted(4))
    others = [other for each in every for other in reordered(each)]
    parity(pool, [drawn(each, draw) for each in [*every, *draw.sample(others, len(others) // 5)]])


@pytest.mark.more
def test_a_covering_set_of_eight_ranks(pool):
    parity(pool, covering(list(accepted(8))))


def wrong(group, case, expected):
    """What the matrix says of a twin one of whose ranks goes wrong by a millionth."""
    plain, gradients, parameters = expected
    spoiled = {name: each if each is None else each + 1e-6 * (name == "norm.weight") for name, each in
               gradients.items()}
    return layouts.differences(case, (plain, spoiled, parameters))


def test_the_matrix_sees_a_millionth(pool):
    case = Case(Layout(2, dp=2, zero=1, microbatches=2), optimizer="momentum")
    known = layouts.reference(case.plain)
    layouts.known[case.plain] = known
    outcomes = pool(4).run(wrong, case, known)
    with pytest.raises(AssertionError, match="dp=2"):
        layouts.check(case, outcomes)
