"""Queues: published values, a simulated queue, and the point where batch and time agree."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.cost import little, md1_wait, steady


@pytest.mark.parametrize(("busy", "wait"), [(0.5, 0.5), (0.7, 7 / 6), (0.8, 2.0), (0.9, 4.5)])
def test_the_wait_in_a_queue_of_equal_services(busy, wait):
    assert md1_wait(busy, 1.0) == pytest.approx(wait)
    assert md1_wait(busy / 3, 3.0) == pytest.approx(3 * wait)


def test_a_pipeline_of_two_waits_as_distserve_says():
    """D + R D² / (4 (2 − R D)): each half takes D/2, and the queue is before the first (arXiv:2401.09670, §3.1)."""
    rate, whole = 5, 0.1
    assert whole + md1_wait(rate, whole / 2) == pytest.approx(
        whole + rate * whole**2 / (4 * (2 - rate * whole))) == pytest.approx(0.10833, rel=1e-3)


def test_the_wait_is_that_of_a_simulated_queue():
    chance, now, free, waits = random.Random(3), 0.0, 0.0, []
    for _ in range(200_000):
        now += chance.expovariate(0.8)
        waits.append(max(0.0, free - now))
        free = max(free, now) + 1.0
    assert sum(waits) / len(waits) == pytest.approx(md1_wait(0.8, 1.0), rel=0.05)


def test_a_queue_that_grows_for_ever_is_refused_with_the_servers_it_takes():
    for rate in (1.0, 2.5):
        with pytest.raises(ValueError, match=rf"busy {rate:.2f} times over: .* take {int(rate) + 1} servers"):
            md1_wait(rate, 1.0)
    with pytest.raises(ValueError, match="rate must be a number above 0"):
        md1_wait(0, 1)


def test_littles_law():
    assert little(10, 20) == 200
    assert little(168e9 / 86400, 1 / 21) == pytest.approx(92_593, rel=1e-4)  # DeepSeek's streams at once


@settings(max_examples=60)
@given(a=st.floats(0.001, 0.1), b=st.floats(1e-6, 1e-3), tokens=st.floats(1, 1e4))
def test_the_fixed_point_of_a_straight_line_is_its_closed_form(a, b, tokens):
    """B = λ O (a + b B), so B = λ O a / (1 − λ O b); with 1 − λ O b ≤ 0 no batch keeps pace."""
    most = 10**5
    found = steady(tokens / 100, 100, lambda work: a + b * len(work), context=9, most=most)
    batch = tokens * a / (1 - tokens * b) if tokens * b < 1 else float("inf")
    if batch < 1:
        assert found.tpot == pytest.approx(a + b) and found.batch == pytest.approx(tokens * (a + b))
    elif batch <= most - 1:
        assert found.batch == pytest.approx(batch, rel=1e-6) == pytest.approx(tokens * found.tpot)
        assert found.tpot == pytest.approx(a + b * batch, rel=1e-6)
    elif batch > most:
        assert (found.batch, found.tpot) == (None, None)
        assert found.limit == ("memory" if batch <= 8 * most else "speed")


def test_more_time_a_token_is_more_requests_at_once_is_more_time_a_token():
    """One multiplication with the time of a single request is wrong by half here."""
    step = lambda work: 0.02 + 0.001 * len(work)  # noqa: E731
    found = steady(5, 100, step, context=9, most=300)
    assert 500 * step([0]) == pytest.approx(10.5) and found.batch == pytest.approx(20)
    assert found.tpot == pytest.approx(0.04)
    assert found.tokens == pytest.approx(300 / 0.32)


def test_what_is_missing_is_named():
    step = lambda work: 0.02 + 0.001 * len(work)  # noqa: E731
    assert steady(5, 100, step, context=9, most=10).limit == "memory"
    assert steady(11, 100, step, context=9, most=300).limit == "speed"
    assert steady(5, 100, step, context=9, most=300, prefill=0.2).limit == "speed"


def test_prompts_of_its_own_slow_a_server_down():
    step = lambda work: 0.02 + 0.001 * len(work)  # noqa: E731
    alone, both = (steady(2, 100, step, context=9, most=900, prefill=prefill) for prefill in (0.0, 0.25))
    assert alone.batch == pytest.approx(5) and alone.tpot == pytest.approx(0.025)
    assert both.batch == pytest.approx(200 * 0.04 / (1 - 200 * 0.002)) and both.tpot == pytest.approx(both.batch / 200)


def test_a_pipeline_has_a_batch_in_each_stage():
    step = lambda work: 0.02 + 0.001 * len(work)  # noqa: E731
    assert steady(10, 100, step, context=9, most=300, flight=2).batch == pytest.approx(40, rel=0.03)


def test_the_step_is_asked_for_decodes_of_the_mean_context():
    seen = []
    steady(1, 10, lambda work: seen.append(list(work)) or 0.01, context=77, most=4)
    assert seen and {each for work in seen for each in work} == {(1, 77)}
    for wrong in (dict(answer=0), dict(most=0), dict(context=0), dict(rate=-1)):
        with pytest.raises(ValueError, match="must be"):
            steady(**{**dict(rate=1, answer=1, step=lambda work: 1, context=1, most=1), **wrong})
