"""Requests a second in time: one pool against two on as many instances, and the numbers behind."""

import math
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.cost import Load, Rate, best_split, colocated, colocated_at, decode_pool, md1_wait, prefill_pool, steady
from shardlab.cost.serve_rates import first_token, in_a_step, keeps_at, prefill_seconds, waiting
from shardlab.cost.serve_step import serve_step
from shardlab.cost.why_not import alone
from shardlab.serve import BlockPool, Cluster, Instance, RoundRobin, Scheduler, Simulated, mixed, prefill_first
from shardlab.serve.arrivals import poisson
from shardlab.serve.workload import synthetic
from shardlab.specs import find_card, find_model

FREE = Load(rate=1, prompt=1000, answer=100)


def step(work):
    """5 ms, 50 µs a token and 1 ns for each pair of a token and one of its context."""
    return 5e-3 + sum(5e-5 * new + 1e-9 * new * context for new, context in work)


def test_distserves_first_figure():
    """Two instances for prompts at 5.6 requests/s each and one for answers at 10: 3.3 a GPU, where one pool does 1.6
    (arXiv:2401.09670, §1)."""
    assert best_split(5.6, 10, 3) == (2, 10)
    assert best_split(5.6, 10, 3)[1] / 3 == pytest.approx(3.3333, rel=1e-4)
    with pytest.raises(ValueError, match="one instance can't be split"):
        best_split(1, 1, 1)


@given(prefill=st.floats(0.1, 100), decode=st.floats(0.1, 100), n=st.integers(2, 60))
def test_the_best_split_is_the_best_of_all(prefill, decode, n):
    every = [min(p * prefill, (n - p) * decode) for p in range(1, n)]
    assert best_split(prefill, decode, n)[1] == max(every)
    assert every[best_split(prefill, decode, n)[0] - 1] == max(every)


def test_whole_prompts_between_steps_by_hand():
    load, rate = replace(FREE, prompt=1000, answer=100), 4.0
    prompt = step([(1000, 1000)])
    found = colocated_at(rate, step, load, 300, None)
    free = 1 - rate * prompt
    assert found.tpot * free == pytest.approx(5e-3 + found.batch * (5e-5 + 1050e-9))
    assert found.batch == pytest.approx(rate * 100 * found.tpot)
    assert found.ttft == pytest.approx(md1_wait(rate, prompt) + prompt)
    same = steady(rate, 100, step, context=1050, most=300, prefill=prompt)
    assert (same.batch, same.tpot) == (pytest.approx(found.batch), pytest.approx(found.tpot))
    assert found.gap > prompt > found.tpot


def test_pieces_by_hand():
    load, rate, budget = replace(FREE, prompt=1000, answer=100), 4.0, 250
    found = colocated_at(rate, step, load, 300, budget)
    n = int(found.batch) + 1
    seconds, one = prefill_seconds(step, load, budget, n)
    assert one == step([(1, 1050)] * n + [(250 - n, (1000 + 250 - n) // 2)]) and seconds == one * 1000 / (250 - n)
    plain, share = step([(1, 1050)] * n), rate * seconds
    assert found.tpot == pytest.approx(1 / (share / one + (1 - share) / plain), rel=0.02)
    assert found.ttft == pytest.approx(md1_wait(rate, seconds) + seconds) and found.gap == one


def test_smaller_pieces_shorten_the_gap_and_lengthen_the_prompt():
    """SV16: a step's time grows with the prompt tokens in it, and each further step costs something of its own."""
    found = [colocated_at(1.0, step, FREE, 300, budget) for budget in (128, 256, 512, 1024)]
    assert [one.gap for one in found] == sorted(one.gap for one in found)
    assert [one.ttft for one in found] == sorted((one.ttft for one in found), reverse=True)


def test_hits_leave_the_rest_to_compute_over_the_whole_context():
    half = replace(FREE, hits=0.5)
    assert (half.uncached, half.context, half.longest) == (500, 1050, 1100)
    assert prefill_seconds(step, half)[0] == step([(500, 1000)])
    assert replace(FREE, hits=0.9999).uncached == 1


@settings(deadline=None, max_examples=40)
@given(a=st.floats(1e-3, 0.05), b=st.floats(1e-6, 1e-3), prompt=st.integers(1, 9000), answer=st.integers(1, 900),
       most=st.integers(1, 64), n=st.integers(2, 9))
def test_without_limits_one_pool_does_as_much_as_two(a, b, prompt, answer, most, n):
    """No instance waits for the other kind of work: N / (S + O t/B) is at least min(n_P / S, n_D B / (O t))."""
    def line(work):
        return a + b * sum(new for new, _ in work)

    load = Load(rate=1, prompt=prompt, answer=answer)
    one, prompts, answers = colocated(line, load, most), prefill_pool(line, load), decode_pool(line, load, most)
    assert n * one.rate >= best_split(prompts.rate, answers.rate, n)[1] * (1 - 1e-4)


def test_the_rate_is_the_highest_that_keeps_each_limit():
    for limit, value in (("ttft", 0.08), ("tpot", 0.012), ("gap", 0.03)):
        load = replace(FREE, **{limit: value})
        found = colocated(step, load, 300)
        assert 0 < found.rate < colocated(step, FREE, 300).rate
        assert getattr(found, limit) <= value
        assert keeps_at(0.999 * found.rate, step, load, 300) and not keeps_at(1.001 * found.rate, step, load, 300)


def test_pools_keep_their_own_limit():
    prompts = prefill_pool(step, replace(FREE, ttft=0.08))
    service = step([(1000, 1000)])
    assert md1_wait(prompts.rate, service) + service == pytest.approx(0.08, rel=1e-4)
    later = prefill_pool(step, replace(FREE, ttft=0.08), after=0.01)
    assert later.rate < prompts.rate and later.ttft <= 0.08
    answers = decode_pool(step, replace(FREE, tpot=0.01), 300)
    assert answers.tpot == pytest.approx(0.01, rel=1e-4) and answers.rate * 100 * 0.01 == pytest.approx(
        answers.batch, rel=1e-4)
    assert decode_pool(step, FREE, 10).batch == pytest.approx(10, rel=1e-3)


def test_what_no_rate_keeps_is_none():
    for limits in (dict(ttft=0.01), dict(tpot=0.004), dict(gap=0.004)):
        found = colocated(step, replace(FREE, **limits), 300)
        assert (found.rate, found.how) == (0.0, "nothing keeps the times") and isinstance(found, Rate)


def test_a_pipeline_of_two_takes_prompts_twice_as_often_but_no_sooner():
    one, two = (prefill_pool(step, FREE, flight=flight) for flight in (1, 2))
    assert two.rate == pytest.approx(2 * one.rate, rel=1e-4)
    at = [colocated_at(2.0, step, FREE, 300, None, flight) for flight in (1, 2)]
    assert at[1].ttft > step([(1000, 1000)]) and at[1].ttft < at[0].ttft


@pytest.mark.parametrize(("wrong", "said"), [
    (dict(rate=0), "rate must be a number above 0"), (dict(prompt=0), "prompt must be a whole"),
    (dict(answer=1.5), "answer must be a whole"), (dict(hits=1), "hits = 1 is a share of the prompt"),
    (dict(ttft=0), "ttft must be a number above 0"), (dict(gap=-1), "gap must be a number above 0")])
def test_a_load_that_is_none_is_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        replace(FREE, **wrong)


def busiest(step, load, most):
    """Requests a second of the simulator, of which more are asked than it can, by the best of some policies."""
    asked = synthetic(poisson(3 * colocated(step, load, most).rate, 900 if load.prompt < 5000 else 200), load.prompt,
                      load.answer, 1000)
    best = 0.0
    for policy in (prefill_first(), mixed(512), mixed(1024), mixed(8192)):
        pool = BlockPool(most * -(-load.longest // 16) + most)
        answers = Cluster(Simulated(lambda _, work: step(work)), [Instance("a", Scheduler(pool, policy, most=most))],
                          RoundRobin()).run(asked)
        best = max(best, len(answers) / max(answer.times[-1] for answer in answers))
    return best


@pytest.mark.parametrize(("prompt", "answer", "most"), [(10, 10, 256), (100, 10, 256), (1000, 100, 256),
                                                         (8000, 300, 60)])
def test_the_most_is_the_simulators(prompt, answer, most):
    """Short prompts share steps: one a step would be a sixth of it for ten tokens, and half for a hundred."""
    llama, load = find_model("llama-3.1-8b"), Load(rate=1, prompt=prompt, answer=answer)
    step = serve_step(llama, None, alone(find_card("h100")))
    assert colocated(step, load, most).rate == pytest.approx(busiest(step, load, most), rel=0.12)


def test_prompts_share_a_step_as_many_as_come_meanwhile():
    short = replace(FREE, prompt=10, answer=10)
    assert in_a_step(short, 300, 250, 30) == 22 and in_a_step(short, 5, 250, 30) == 5 == in_a_step(short, 5, None, 0)
    assert in_a_step(FREE, 300, 250, 30) == 1 and in_a_step(FREE, 300, None, 0) == 8

    def one(m):
        return prefill_seconds(step, short, None, 0, m)[1]

    assert one(3) == step([(10, 10)] * 3) and prefill_seconds(step, short, None, 0, 3)[0] == one(3) / 3
    for rate in (1, 100, 400, 900):
        m = waiting(rate, 500, one)
        assert rate * one(m) <= m and (m == 1 or rate * one(m - 1) > m - 1)
    waits = [first_token(rate, 500, one, one(1)) for rate in (1, 100, 170, 180, 400, 900, 1500)]
    assert waits == sorted(waits) and waits[0] == pytest.approx(md1_wait(1, one(1)) + one(1))
    assert waits[4] == pytest.approx(1.5 * one(waiting(400, 500, one))) and first_token(5000, 500, one, one(1)) == inf


@pytest.mark.parametrize(("call", "said"), [
    (lambda: prefill_pool(step, FREE, after=-1), "after must be"), (lambda: decode_pool(step, FREE, math.nan), "most"),
    (lambda: best_split(math.nan, 1, 4), "prefill must be"), (lambda: best_split(1, -1, 4), "decode must be"),
    (lambda: steady(1, 10, step, context=9, most=9, prefill=math.nan), "prefill must be"),
    (lambda: steady(1, 10, step, context=9, most=9, flight=0), "flight must be"),
])
def test_what_is_no_number_is_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()
