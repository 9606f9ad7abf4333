"""Every schedule that the library makes, over its sizes: proved, as deep as promised, and refused by name elsewhere."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lists import made

from shardlab.schedule import (
    SCHEDULES,
    check,
    computing,
    dualpipe,
    dualpipe_v,
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    peak_live,
    placement,
    size,
    with_transfers,
    zero_bubble,
)


def prove(ranks, microbatches, chunks):
    for what, orders in made(ranks, microbatches, chunks):
        name = what[0]
        try:
            check(orders)
        except ValueError as error:
            raise AssertionError(f"{what}: {error}") from error
        a_rank = {"interleaved": chunks, "forward_only": chunks, "dualpipe": 2, "dualpipe_v": 2}.get(name, 1)
        assert size(orders) == (ranks * (a_rank if name != "dualpipe" else 1), microbatches), what
        assert {len(stages) for stages in placement(orders)} == {a_rank}, what


def test_small_sizes_are_all_proved():
    """FAULTS C3: under sends that wait for their receivers, stages 2 to 8, chunks 1 to 3, micro-batches 1 to 9."""
    for ranks in range(1, 9):
        for microbatches in range(1, 10):
            for chunks in range(1, 4):
                prove(ranks, microbatches, chunks)


@settings(max_examples=20)
@given(st.integers(1, 16), st.integers(1, 64), st.integers(1, 4))
def test_larger_ones_are_proved(ranks, microbatches, chunks):
    prove(ranks, microbatches, chunks)


def every(group, ranks):
    """A process's share of the sizes; how many those are."""
    sizes = [*product(range(1, 65), range(1, 5))][group.rank() :: group.size()]
    for microbatches, chunks in sizes:
        prove(ranks, microbatches, chunks)
    return len(sizes)


@pytest.mark.more
@pytest.mark.parametrize("ranks", range(1, 17))
def test_all_sizes_are_proved(pool, ranks):
    """By three processes: the sizes with one chunk, which have most schedules, are then not all one's."""
    assert sum(pool(3).run(every, ranks)) == 64 * 4


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (1, 5), (2, 2), (3, 7), (4, 4), (4, 16), (8, 19)])
def test_activations_held_are_as_many_as_published(ranks, microbatches):
    """GPipe's grow with the micro-batches, and the others' don't."""
    every = range(ranks)
    assert peak_live(gpipe(ranks, microbatches)) == [microbatches] * ranks
    assert peak_live(one_f_one_b(ranks, microbatches)) == [ranks - rank for rank in every]
    assert peak_live(zero_bubble(ranks, microbatches)) == [ranks] * ranks
    assert peak_live(dualpipe_v(ranks, 2 * microbatches)) == [2 * ranks + 1] * ranks
    for chunks in (2, 3, 4):
        peaks = peak_live(interleaved(ranks, 2 * ranks, chunks))
        # of 1/(ranks · chunks) of the model each: 1 + (p − 1)/(pv) times 1F1B's on the first rank
        assert peaks[0] == pytest.approx(ranks * chunks * (1 + (ranks - 1) / (ranks * chunks)))
        assert peaks == [peaks[0] - 2 * rank for rank in every]
    assert peak_live(forward_only(ranks, microbatches)) == [0] * ranks


@pytest.mark.parametrize("ranks", [2, 4, 6])
def test_dualpipe_holds_one_more_than_it_has_ranks(ranks):
    for microbatches in (2 * ranks, 4 * ranks):
        assert set(peak_live(dualpipe(ranks, microbatches))) == {ranks + 1}


def test_fewer_micro_batches_than_stages_are_all_held():
    assert peak_live(one_f_one_b(4, 2)) == [2, 2, 2, 1]
    assert peak_live(zero_bubble(4, 2)) == [2, 2, 2, 2]


def test_1f1b_by_hand():
    told = [" ".join(f"{action.kind}{action.microbatch}" for action in order)
            for order in computing(one_f_one_b(3, 4))]
    assert told == ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]


def test_interleaved_goes_in_rounds_through_the_stages_of_a_rank():
    forward = [[(action.stage, action.microbatch) for action in order if action.kind == "F"]
               for order in interleaved(2, 4, 2)]
    assert forward == [[(s, i) for i0 in (0, 2) for s in stages for i in (i0, i0 + 1)]
                       for stages in ((0, 2), (1, 3))]
    assert interleaved(4, 8, 1) == one_f_one_b(4, 8)


def test_zero_bubble_is_1f1b_with_backward_in_two():
    whole = [[action._replace(kind="B") if action.kind == "I" else action for action in order if action.kind != "W"]
             for order in computing(zero_bubble(4, 8))]
    assert whole == computing(one_f_one_b(4, 8))


def test_dualpipe_folded_at_its_middle_is_dualpipe_v():
    """Rank r of one copy does what DualPipeV's rank r does, on half of the micro-batches."""
    for mine, theirs in zip(computing(dualpipe(8, 32))[:4], computing(dualpipe_v(4, 16)), strict=True):
        assert [(action.kind, action.paired) for action in mine] == [(action.kind, action.paired) for action in theirs]


def test_messages_put_in_twice_stand_as_once():
    for _, orders in made(3, 6, 1):
        assert with_transfers(orders) == with_transfers(computing(orders)) == orders


def test_a_rank_sends_nothing_to_itself():
    for name in ("gpipe", "1f1b", "zero_bubble"):
        assert computing(SCHEDULES[name](1, 3)) == SCHEDULES[name](1, 3)
    turn = dualpipe_v(2, 4)[1]
    assert not [action for action in turn if action.kind == "send F" and action.stage == 1]


@pytest.mark.parametrize(("make", "message"), [
    (lambda: interleaved(4, 10), "microbatches = 10 is no multiple of 4, .*: take 8 or 12$"),
    (lambda: interleaved(4, 3), "microbatches = 3 is no multiple of 4, .*: take 4$"),
    (lambda: dualpipe(3, 8), "ranks = 3 is no multiple of 2, .*: take 2 or 4$"),
    (lambda: dualpipe(1, 8), "ranks = 1 is no multiple of 2, .*: take 2$"),
    (lambda: dualpipe(4, 7), "microbatches = 7 is below 8, .*: take 8 or more$"),
    (lambda: dualpipe(4, 9), "microbatches = 9 is no multiple of 2, .*: take 8 or 10$"),
    (lambda: dualpipe_v(4, 7), "microbatches = 7 is below 8, .*: take 8 or more$"),
    (lambda: gpipe(0, 1), "ranks = 0: give at least 1"),
    (lambda: forward_only(1, 1, 0), "chunks = 0: give at least 1"),
    (lambda: zero_bubble(2, -1), "microbatches = -1: give at least 1"),
])
def test_a_size_without_its_schedule_is_refused_with_the_nearest_that_has_it(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("size", [2.0, "4", None, True])
def test_a_size_is_a_whole_number(size):
    for make in SCHEDULES.values():
        with pytest.raises(TypeError, match="must be a whole number, not"):
            make(2, size)
