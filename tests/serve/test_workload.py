"""Arrivals at the rate asked for, and requests as long as asked for."""

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.serve.arrivals import drifting, gamma, mean_rate, poisson
from shardlab.serve.request import Request
from shardlab.serve.workload import Lengths, first, rescale, synthetic

MANY = 40_000


def gaps(arrivals):
    return np.diff([0.0, *arrivals])


@pytest.mark.parametrize("cv", [0, 0.3, 1.0, 3.0])
def test_gaps_have_the_mean_and_the_variation_asked_for(cv):
    drawn = gaps(gamma(5.0, cv, MANY))
    assert drawn.min() >= 0
    assert drawn.mean() == pytest.approx(1 / 5, rel=4 * max(cv, 1e-9) / MANY**0.5)  # four standard errors
    assert drawn.std() / drawn.mean() == pytest.approx(cv, rel=0.05, abs=1e-9)


def test_a_rate_is_gaps_over_time_whenever_it_began():
    assert mean_rate([11.0, 12.0, 14.0]) == mean_rate([4.0, 1.0, 2.0]) == 2 / 3


def test_poisson_counts_vary_as_much_as_their_mean():
    counts = np.histogram(poisson(5.0, MANY), bins=np.arange(0, 7000, 1.0))[0]
    assert counts.mean() == pytest.approx(5.0, rel=0.02) and counts.var() == pytest.approx(5.0, rel=0.06)


def test_a_rate_that_drifts_is_each_rate_in_its_time():
    arrivals = drifting([20.0, 0.0, 5.0], 500.0, seed=3)
    counts = np.histogram(arrivals, bins=[0, 500, 1000, 1500])[0]
    assert counts[1] == 0 and arrivals == sorted(arrivals)
    for count, expected in zip(counts, (10_000, 0, 2500), strict=True):
        assert abs(count - expected) <= 4 * expected**0.5
    within = [t for t in arrivals if t < 500]
    assert gaps(within).std() / gaps(within).mean() == pytest.approx(1, rel=0.05), "Poisson within a piece"
    assert len({len(drifting([2.0], 100.0, seed)) for seed in range(8)}) > 1, "how many come is chance too"


@pytest.mark.parametrize("draw", [lambda seed: poisson(3.0, 50, seed), lambda seed: gamma(3.0, 2.0, 50, seed),
                                  lambda seed: drifting([1.0, 9.0], 20.0, seed),
                                  lambda seed: synthetic([1.0] * 20, Lengths(50, 1), Lengths(9, 1), 99, seed, 3, 8)])
def test_a_seed_is_all_that_decides(draw):
    np.random.seed(5)
    once = draw(7)
    np.random.seed(6)
    assert draw(7) == once != draw(8)


def test_gaps_and_lengths_of_one_seed_have_nothing_to_do_with_one_another():
    requests = synthetic(poisson(1.0, 5000), Lengths(100, 1.0), Lengths(100, 1.0), vocab=50)
    drawn = [gaps([r.arrival for r in requests]), [len(r.prompt) for r in requests], [r.new_tokens for r in requests]]
    assert np.abs(np.corrcoef(drawn) - np.eye(3)).max() < 0.06


@pytest.mark.parametrize("call, said", [
    (lambda: poisson(0, 5), "rate must be a number above 0"),
    (lambda: poisson(1.0, 0), "count must be a whole number"),
    (lambda: gamma(1.0, -1, 5), "cv must be a number above 0"),
    (lambda: poisson(1.0, 5, seed=-1), "seed must be a whole number of at least 0"),
    (lambda: drifting([2, -1], 5), "rates must be 0 or above"),
    (lambda: drifting([0.0, 0.0], 5), "one of them above 0"),
    (lambda: drifting([], 5), "one of them above 0"),
    (lambda: mean_rate([1.0, 1.0]), "2 arrivals, all at one time"),
    (lambda: mean_rate([]), "0 arrivals"),
    (lambda: synthetic([1.0, 2.0], [5], 5, 10), "1 lengths in prompts for 2 arrivals"),
    (lambda: synthetic([1.0], 5, 0, 10), "new_tokens must be a whole number of at least 1, not 0"),
    (lambda: synthetic([1.0], 5, 5, 10, prefixes=2), "2 prefixes of 0 tokens"),
    (lambda: synthetic([1.0], 5, 5, 10, shared=2), "0 prefixes of 2 tokens"),
])
def test_what_can_not_be_drawn_is_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()


def test_requests_have_the_lengths_asked_for():
    requests = synthetic([0.5, 1.5, 1.5], [3, 1, 2], 7, vocab=11)
    assert [(r.number, len(r.prompt), r.new_tokens, r.arrival) for r in requests] == [
        (0, 3, 7, 0.5), (1, 1, 7, 1.5), (2, 2, 7, 1.5)]
    drawn = synthetic([0.0] * 20_000, Lengths(512, 0.9), Lengths(64, 0.5, most=100), vocab=11)
    ins, outs = [len(r.prompt) for r in drawn], [r.new_tokens for r in drawn]
    assert np.mean(ins) == pytest.approx(512, rel=0.03) and np.std(ins) / np.mean(ins) == pytest.approx(0.9, rel=0.06)
    assert min(outs) >= 1 and max(outs) == 100 and max(ins) <= 8192
    ids = np.concatenate([np.asarray(r.prompt) for r in drawn[:2000]])
    assert set(np.unique(ids)) == set(range(11)), "all of the vocabulary and nothing else"
    assert isinstance(drawn[0].prompt, array) and drawn[0].prompt.itemsize == 4


def test_prompts_share_prefixes_and_go_on_alone():
    requests = synthetic([0.0] * 400, [6 if i % 10 else 3 for i in range(400)], 1, vocab=1000, prefixes=3, shared=4)
    begins = {tuple(r.prompt[:4]) for r in requests if len(r.prompt) == 6}
    assert len(begins) == 3
    assert all(any(begin[:3] == tuple(r.prompt) for begin in begins) for r in requests if len(r.prompt) == 3)
    assert len({tuple(r.prompt[4:]) for r in requests if len(r.prompt) == 6}) > 350
    counts = [sum(tuple(r.prompt[:3]) == begin[:3] for r in requests) for begin in begins]
    assert min(counts) > 80, "drawn evenly"


@given(st.lists(st.floats(0, 1e4), min_size=2, max_size=20), st.floats(0.01, 1000))
def test_rescaled_it_is_the_same_trace_at_the_rate_asked_for(times, rate):
    requests = [Request(i, [1], 1, t) for i, t in enumerate(times)]
    if max(times) - min(times) < 1e-3:
        return
    there = rescale(requests, rate)
    assert mean_rate([r.arrival for r in there]) == pytest.approx(rate)
    assert [r.number for r in there] == [r.number for r in requests]
    back = rescale(there, mean_rate(times))
    assert [r.arrival for r in back] == pytest.approx(times)


def test_the_first_are_those_due_first():
    requests = [Request(i, [1], 1, t) for i, t in enumerate((3.0, 1.0, 2.0))]
    assert [r.number for r in first(requests, 2)] == [1, 2]
    assert [r.number for r in first(requests, 9)] == [1, 2, 0]
