"""Waits and rates of small runs by hand, and λ·W against a count."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from served import build

from shardlab.serve import Engine, VirtualClock, mixed
from shardlab.serve.arrivals import gamma, poisson
from shardlab.serve.first_come import first_come
from shardlab.serve.metrics import Metrics, end_to_end, finished, tpot, ttft
from shardlab.serve.request import Answer, Request
from shardlab.serve.workload import Lengths, synthetic


def answer(number, arrival, times, prompt=10, new=None, **more):
    request = Request(number, [1] * prompt, new or max(1, len(times)), arrival)
    return Answer(request, [7] * len(times), list(times), **more)


RUN = [answer(0, 1.0, [1.5, 1.75, 2.0], prompt=100, cached=64),
       answer(1, 2.0, [3.0], prompt=50),
       answer(2, 4.0, [4.25, 5.25], prompt=50, preempted=2),
       answer(3, 5.0, [], refused="1,000 tokens need 63 blocks of 32")]


def test_the_waits_of_one_request():
    first, single = RUN[:2]
    assert (ttft(first), end_to_end(first), tpot(first)) == (0.5, 1.0, 0.25)
    assert (ttft(single), end_to_end(single), tpot(single)) == (1.0, 1.0, None)


def test_a_small_run_by_hand():
    metrics = Metrics(RUN)
    assert metrics.waits == {"TTFT": [0.5, 1.0, 0.25], "TPOT": [0.25, 1.0], "ITL": [0.25, 0.25, 1.0],
                             "end to end": [1.0, 1.0, 1.25]}
    assert (metrics.percentile("TTFT", 50), metrics.percentile("TTFT", 90)) == (0.5, pytest.approx(0.9))
    assert metrics.seconds == 4.25 and metrics.achieved == 3 / 4.25
    assert metrics.offered == 3 / 4.0, "three gaps in four seconds, the refused one's among them"
    assert metrics.tokens == {"in": 200 / 4.25, "out": 6 / 4.25, "total": 206 / 4.25}
    assert (metrics.refused, metrics.preempted, len(metrics.done)) == (1, 2, 3)
    assert metrics.in_system == pytest.approx((3.25 / 4.25, 3.25 / 4.25))


def test_goodput_is_joint_and_one_token_answers_for_its_first_alone():
    def good(**limits):
        return [a.request.number for a in Metrics(RUN, **limits).good]

    assert good() == [0, 1, 2]
    assert good(ttft_limit=0.5) == [0, 2], "a limit is kept when it is just reached"
    assert good(tpot_limit=0.25) == [0, 1], "one token: it has no TPOT to miss"
    assert good(ttft_limit=0.5, tpot_limit=0.25) == [0]
    assert good(ttft_limit=0.25, tpot_limit=0.25) == [], "either is kept by some, both by none"
    metrics = Metrics(RUN, 0.5, 0.25)
    assert metrics.good_share == 1 / 4, "of all that were asked"
    assert metrics.goodput == 1 / 4.25 and metrics.limits == {"TTFT": 0.5, "TPOT": 0.25}


def test_what_waits_in_front_of_the_door_is_waited():
    """FAULTS SV35 (vllm-project/vllm#54101): 8 requests, 10/s evenly, 0.5 s each, one at a time: 1,400 ms, the mean."""
    arrivals = gamma(10.0, 0, 8)
    begun = np.add(arrivals, first_come(arrivals, [0.5] * 8)).tolist()
    metrics = Metrics([answer(i, arrivals[i], [begun[i] + 0.5]) for i in range(8)])
    assert np.mean(metrics.waits["TTFT"]) - 0.5 == pytest.approx(1.4)
    assert metrics.offered == pytest.approx(10.0) and metrics.achieved == pytest.approx(2.0)


def test_each_rate_is_divided_by_the_cards_of_its_role():
    """FAULTS SV28 (SemiAnalysisAI/InferenceX#131, #293)."""
    pools = Metrics(RUN, 0.5, cards={"prefill": 4, "decode": 8})
    assert [pools.cards_for(kind) for kind in ("in", "out", "total")] == [4, 8, 12]
    rows = {name: (value, how) for name, value, how in pools.rows}
    assert rows["in"] == ("47.1 tokens/s", "prompts, 32.0% of them from a cache; ÷ 4 prefill cards = 11.8 a card")
    assert rows["out"] == ("1.41 tokens/s", "new tokens; ÷ 8 decode cards = 0.176 a card")
    assert rows["total"] == ("48.5 tokens/s", "in and out; ÷ 12 cards = 4.04 a card")
    assert rows["goodput"][1].endswith("÷ 12 cards = 0.0392 a card")
    together = Metrics(RUN, cards=12)
    assert [together.cards_for(kind) for kind in ("in", "out", "total")] == [12] * 3
    assert ("out", "1.41 tokens/s", "new tokens; ÷ 12 cards = 0.118 a card") in together.rows
    assert "card" not in str(Metrics(RUN))


def test_the_table():
    assert str(Metrics(RUN, ttft_limit=0.5, tpot_limit=0.25)).splitlines() == [
        "4 requests: 3 finished, 1 refused; 2 preemptions",
        "offered         0.75 requests/s                         from the first arrival to the last",
        "achieved        0.706 requests/s                        3 finished in 4.25 s",
        "TTFT            p50  500 ms  p90  900 ms  p99  990 ms   from when a request was due to its first token",
        "TPOT            p50  625 ms  p90  925 ms  p99  992 ms   (end to end − TTFT) ÷ (tokens − 1); none for 1 of one "
        "token",
        "ITL             p50  250 ms  p90  850 ms  p99  985 ms   between a token and the next, all of them",
        "end to end      p50     1 s  p90   1.2 s  p99  1.24 s   from when a request was due to its last token",
        "goodput         0.235 requests/s                        25.0% of those asked kept TTFT ≤ 500 ms and TPOT ≤ "
        "250 ms, one token TTFT alone",
        "in              47.1 tokens/s                           prompts, 32.0% of them from a cache",
        "out             1.41 tokens/s                           new tokens",
        "total           48.5 tokens/s                           in and out",
        "in the system   0.765 requests                          L, counted; λ·W = 0.765",
    ]
    html = Metrics(RUN)._repr_html_()
    assert html.count("<tr>") == 10 and "<caption>4 requests" in html


def test_a_request_is_finished_at_its_length_or_at_its_stop_token():
    request = Request(0, [1], 3, stop=9)
    for tokens, expected in (([1, 2, 3], True), ([1, 9], True), ([1, 2], False), ([], False)):
        assert finished(Answer(request, tokens, [1.0] * len(tokens))) == expected
    left = Metrics([*RUN, answer(4, 1.0, [9.0], new=2), answer(5, 2.0, [], new=2)])
    assert len(left.done) == 3 and left.seconds == 4.25, "what was cut off is in no measure but what was offered"
    assert left.title == "6 requests: 3 finished, 1 refused, 2 not finished; 2 preemptions"


@pytest.mark.parametrize("answers", [[], [answer(0, 0.0, [], refused="too long")], [answer(0, 1.0, [1.0])]])
def test_where_nothing_took_any_time_there_are_no_rates(answers):
    metrics = Metrics(answers, ttft_limit=1.0, cards=2)
    assert all(np.isnan([metrics.offered, metrics.achieved, *metrics.tokens.values(), *metrics.in_system]))
    assert "– tokens/s" in str(metrics)


@given(st.lists(st.tuples(st.floats(0, 100), st.lists(st.floats(0, 10), min_size=1, max_size=5)), min_size=1,
                max_size=20))
def test_little_s_law(requests):
    """L = λ·W, whatever came when: the number in the system, sampled here at many times, is the rate times the wait."""
    answers = [answer(i, due, np.cumsum([due, *gaps])[1:].tolist()) for i, (due, gaps) in enumerate(requests)]
    metrics = Metrics(answers)
    if metrics.seconds < 1e-6:
        return
    counted, expected = metrics.in_system
    assert counted == pytest.approx(expected)
    start = min(due for due, _ in requests)
    samples = start + (np.arange(4000) + 0.5) / 4000 * metrics.seconds
    there = sum((samples >= a.request.arrival) & (samples < a.times[-1]) for a in answers)
    assert np.mean(there) == pytest.approx(counted, abs=2 * len(answers) / 4000 + 1e-6)


def test_little_s_law_holds_another_s_count_against_it():
    """What an engine counted; what it said before the first arrival and after the last token is left out."""
    log = [(0.0, 3), (1.0, 1), (2.0, 1), (3.0, 0), (4.0, 1), (5.25, 0), (99.0, 7)]
    assert Metrics(RUN, seen=log).in_system == pytest.approx((3.25 / 4.25, 3.25 / 4.25))
    late = [(1.25, 1), (2.0, 1), (3.0, 0), (4.0, 1), (5.25, 0)]  # the first was seen a quarter of a second too late
    metrics = Metrics(RUN, seen=late)
    assert metrics.in_system == pytest.approx((3.0 / 4.25, 3.25 / 4.25))
    assert metrics.rows[-1] == ("in the system", "0.706 requests",
                                "L, counted; λ·W = 0.765: they differ by more than 1%")


@pytest.mark.parametrize("make, said", [
    (lambda: Metrics([answer(5, 2.0, [1.5, 3.0])]), "request 5, due at 2.0 s, has tokens at .1.5, 3.0. s"),
    (lambda: Metrics([answer(5, 1.0, [3.0, 2.0])]), "times go up from the arrival"),
    (lambda: Metrics([Answer(Request(5, [1], 2), [1, 2], [1.0])]), "request 5 has 2 tokens and 1 times"),
    (lambda: Metrics(RUN, ttft_limit=0), "ttft_limit must be a number above 0"),
    (lambda: Metrics(RUN, tpot_limit=-1), "tpot_limit must be a number above 0"),
    (lambda: Metrics(RUN, cards=0), "cards must be a whole number"),
    (lambda: Metrics(RUN, cards={"prefill": 4}), "cards of prefill: give one number, or prefill and decode"),
    (lambda: Metrics(RUN, cards={"prefill": 4, "decode": 0}), "decode must be a whole number"),
])
def test_what_can_not_be_is_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_of_an_engine_s_answers():
    """Steps of 10 ms, each with a token for every request that decodes, so a token takes 10 ms after the first."""
    engine = Engine(build(), blocks=300, block_size=4, policy=mixed(8, 16), clock=VirtualClock(lambda work: 0.01))
    requests = synthetic(poisson(20.0, 24), Lengths(30, 0.5, most=60), Lengths(4, 0.8, most=9), vocab=101, prefixes=2,
                         shared=12)
    metrics = Metrics(engine.run(requests), tpot_limit=0.011, cards=1)
    assert len(metrics.done) == len(metrics.good) == 24 and metrics.good_share == 1
    assert metrics.waits["TPOT"] == pytest.approx([0.01] * len(metrics.waits["TPOT"]))
    assert min(metrics.waits["TTFT"]) > 0 and len(metrics.waits["ITL"]) == sum(r.new_tokens - 1 for r in requests)
    assert sum(answer.cached for answer in metrics.done) >= 12 * 12, "prefixes are shared, so a cache finds them"
    counted, expected = metrics.in_system
    assert counted == pytest.approx(expected)
