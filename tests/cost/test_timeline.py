"""Time and idle time of schedules: by hand, by the published formulas, and by the two ratios that are called bubble."""

from dataclasses import astuple
from math import inf, nan

import pytest

from shardlab.cost import Times, idle_by_formula, timeline
from shardlab.schedule import (
    SCHEDULES,
    B,
    F,
    computing,
    dualpipe_v,
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    with_transfers,
    zero_bubble,
)

SIZES = [(1, 3), (2, 2), (2, 6), (3, 9), (4, 4), (4, 7), (6, 12), (8, 16)]


def grid(name):
    """(orders, ranks, chunks) of the schedule over some sizes."""
    for ranks, microbatches in SIZES:
        for chunks in (1, 2, 3) if name == "interleaved" else (1,):
            try:
                yield SCHEDULES[name](ranks, microbatches, *[chunks] * (name == "interleaved")), ranks, chunks
            except ValueError:
                continue


MIX = [Times(), Times(2, 3, 1), Times(1, 2, 0), Times(1, 1.5, 0.5), Times(3, 2, 2.5), Times(1, 0.5, 1), Times(2, 2, 1)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_idle_time_is_the_published_one_whatever_the_times(name):
    for orders, ranks, chunks in grid(name):
        for each in MIX:
            line = timeline(orders, each)
            assert line.idle == pytest.approx(idle_by_formula(name, ranks, chunks, each))
            assert [line.total - busy for busy in line.busy] == pytest.approx([line.idle] * ranks)


def test_zero_bubbles_formula_holds_where_weights_fit_into_the_waits():
    """ZB-H1: exactly where W ≤ F and W ≤ I. Elsewhere it stands idle for longer."""
    steps, held = (0, 0.5, 1, 1.5, 2), 0
    for orders, ranks, _ in grid("zero_bubble"):
        for each in (Times(f, i, w) for f in steps for i in steps for w in steps if f + i + w):
            more = timeline(orders, each).idle - idle_by_formula("zero_bubble", ranks, times=each)
            if each.weight <= min(each.forward, each.input) or ranks == 1:
                assert more == pytest.approx(0), (ranks, each)
                held += 1
            else:
                assert more > 0.1, (ranks, each)
    assert held > 200


@pytest.mark.parametrize("name", ["dualpipe", "dualpipe_v"])
def test_dualpipes_formula_holds_where_forward_takes_as_long_as_the_gradient_of_the_input(name):
    """Exactly where W ≤ I = F and a pair takes as long as its two, or no less than its backward pass."""
    for orders, ranks, _ in grid(name):
        for each in (Times(1, 1, 1), Times(2, 2, 1), Times(1, 1, 0)):
            line = timeline(orders, each)
            assert line.idle == pytest.approx(idle_by_formula(name, ranks, times=each))
            for both in (each.backward, each.backward + each.forward / 2):
                gains = Times(each.forward, each.input, each.weight, both=both)
                line = timeline(orders, gains)
                longest = max(line.total - busy for busy in line.busy)
                assert longest == pytest.approx(idle_by_formula(name, ranks, times=gains))
        if ranks >= 4:
            for each in (Times(1, 1.5, 0.5), Times(2, 1, 1), Times(1, 1, 2), Times(1, 1, 1, both=1.5)):
                line = timeline(orders, each)
                assert max(line.total - busy for busy in line.busy) != pytest.approx(
                    idle_by_formula(name, ranks, times=each)), (ranks, each)


def test_two_ratios_are_called_the_bubble():
    """FAULTS, published number 8: of the time of 16 ranks with 32 micro-batches 15/47 is idle, not 15/32."""
    line = timeline(one_f_one_b(16, 32))
    assert line.bubble_over_total == pytest.approx(15 / 47) and round(100 * line.bubble_over_total) == 32
    assert line.bubble_over_ideal == pytest.approx(15 / 32) and round(100 * line.bubble_over_ideal) == 47
    assert line.bubble_over_total == pytest.approx(line.bubble_over_ideal / (1 + line.bubble_over_ideal))
    told = {row[0]: row[2] for row in map(astuple, line.rows)}
    assert (told["bubble over total"], told["bubble over ideal"]) == (31.91, 46.88)


def test_the_bubble_of_interleaving():
    """FAULTS, published number 7: (P − 1)/(M·v + P − 1), 9.9 % for 8 ranks, 16 micro-batches and 4 stages a rank."""
    line = timeline(interleaved(8, 16, 4))
    assert line.bubble_over_total == pytest.approx(7 / (16 * 4 + 7)) and round(100 * line.bubble_over_total, 1) == 9.9
    assert line.bubble_over_total > 1.6 * (8 / 4 - 1) / (8 / 4 + 16 - 1)  # what was published, 5.9 %


def test_four_micro_batches_a_stage_are_not_negligible():
    assert timeline(gpipe(8, 32)).bubble_over_total == pytest.approx(7 / 39)
    assert round(100 * 7 / 39) == 18


def test_another_formula_goes_by_the_name_of_dualpipe_v():
    """MindSpeed's (PP − 1)(F&B + B − W) − F, for backward in one, which is its default: 27 for 8 stages, and not 6."""
    assert idle_by_formula("dualpipe_v", 4) == timeline(dualpipe_v(4, 8)).idle == 6
    assert (8 - 1) * (3 + 2 - 1) - 1 == 27
    whole = [[action._replace(kind="B") if action.kind == "I" else action for action in order if action.kind != "W"]
             for order in computing(dualpipe_v(4, 8))]
    assert timeline(with_transfers(whole)).idle == 14  # this list with backward in one: neither of the two


def test_a_hop_is_waited_for_at_both_ends_by_hand():
    """Two ranks, F 1 and B 2. 1F1B waits for one hop with every micro-batch, as rank 1 has F and B in turn, and each F
    needs an answer to a B before it. GPipe fills once and drains once."""
    for m in (2, 4, 6):
        for hop in (0, 0.25, 1):
            assert timeline(one_f_one_b(2, m), hop=hop).total == 3 * (m + 1) + hop * m
            assert timeline(gpipe(2, m), hop=hop).total == 3 * (m + 1) + 2 * hop
    spans = timeline(one_f_one_b(2, 2), hop=0.5).spans
    assert [(str(a)[:1] + str(a.microbatch), start, end) for a, start, end in spans[1]] == [
        ("F0", 1.5, 2.5), ("B0", 2.5, 4.5), ("F1", 4.5, 5.5), ("B1", 5.5, 7.5)]
    assert [start for _, start, _ in spans[0]] == [0, 1, 5, 8]


def test_interleaving_sends_more_often():
    """From stage to stage, of which there are `chunks` times as many."""
    for orders, stages in ((one_f_one_b(4, 8), 4), (interleaved(4, 8, 2), 8), (interleaved(4, 8, 3), 12)):
        for kind in ("send F", "send B", "recv F", "recv B"):
            assert sum(action.kind == kind for order in orders for action in order) == (stages - 1) * 8


def test_a_hop_between_two_stages_of_one_rank_takes_no_time():
    assert timeline(gpipe(1, 3), hop=9).total == 9
    turn = timeline(dualpipe_v(1, 2), hop=9)
    assert turn.total == 2 * 2 * 3 and turn.idle == 0


def test_unequal_stages_wait_for_the_longest():
    """Rank 1 begins at 1 and is never idle for its 3 · 6; rank 0's last backward takes 2 more."""
    line = timeline(one_f_one_b(2, 3), [Times(1, 1, 1), Times(2, 2, 2)])
    assert (line.total, line.busy, line.ideal, line.idle) == (21, [9, 18], 13.5, 7.5)
    assert (line.bubble_over_total, line.bubble_over_ideal) == (7.5 / 21, 7.5 / 13.5)


def test_times_are_of_stages_and_not_of_ranks():
    line = timeline(interleaved(2, 2, 2), [Times(1, 0, 0), Times(2, 0, 0), Times(4, 0, 0), Times(8, 0, 0)])
    assert line.busy == [2 * (1 + 4), 2 * (2 + 8)]
    line = timeline(forward_only(2, 1, 2), [Times(1), Times(2), Times(4), Times(8)])
    assert line.total == 15 and line.live == [0, 0]


def test_a_pipeline_does_not_shorten_one_request():
    """Each of the stages takes its part of the time, one after another."""
    assert timeline(forward_only(4, 1), Times(1 / 4)).total == 1


def test_a_pair_counts_once():
    orders = dualpipe_v(1, 4)
    pairs = sum(action.paired for order in orders for action in order)
    assert pairs == 5
    assert timeline(orders, Times(1, 1, 1, both=2)).busy == [2 * 4 * 3 - pairs]
    apart = timeline(orders, Times(1, 1, 1))
    assert apart.total == apart.busy[0] == 24
    uneven = timeline(orders, [Times(1, 1, 1, both=2), Times(1, 1, 1, both=2.5)])
    assert uneven.busy == [24 - pairs * 0.75]  # each pair is of both stages


def test_lists_are_priced_with_or_without_their_messages():
    orders = zero_bubble(3, 5)
    assert timeline(orders).spans == timeline(computing(orders)).spans


def test_a_rank_without_stages_is_idle():
    line = timeline([[], [F(0, 0), B(0, 0)]])
    assert (line.total, line.busy, line.live) == (3, [0, 3], [0, 1])


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Times(-1), "forward = -1: a time is a number of seconds from 0"),
    (lambda: Times(1, nan), "input = nan"),
    (lambda: Times(1, 1, inf), "weight = inf"),
    (lambda: Times(both=-1), "both = -1"),
    (lambda: timeline(gpipe(3, 3), [Times()] * 2), "2 times for 3 stages: give one for each, or one for all"),
    (lambda: timeline(gpipe(3, 3), hop=-1), "hop = -1: give seconds from 0"),
    (lambda: timeline(gpipe(3, 3), hop=nan), "hop = nan"),
    (lambda: timeline(gpipe(3, 3), Times(0, 0, 0)), "every action takes 0 s"),
    (lambda: timeline([]), "a schedule needs forward passes"),
    (lambda: timeline([[B(0, 0), F(0, 0)]]), "wait for each other, .*: rank 0 at B of stage 0, micro-batch 0"),
    (lambda: timeline([[F(0, 0)], [F(1, 0), F(1, 1)]]), "for what no rank does: rank 1 at F of stage 1, micro-batch 1"),
    (lambda: idle_by_formula("pipedream", 4), "no formula for 'pipedream'; there is one for gpipe, 1f1b, interleaved"),
])
def test_what_makes_no_sense_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_times_must_be_times():
    with pytest.raises(TypeError, match=r"times must be Times, .*, not \[1, 2, 3\]"):
        timeline(gpipe(3, 3), [1, 2, 3])
