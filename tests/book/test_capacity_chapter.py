"""Chapter 12 says what its numbers say, and lab 12 found what its page predicts; what is published closes."""

from itertools import pairwise

import pytest
from chapters import drawing, figures_of, numbers_of


@pytest.fixture(scope="module")
def page():
    return numbers_of("12_how_many")


@pytest.fixture(scope="module")
def lab():
    return figures_of("12_how_many")


@pytest.fixture(scope="module")
def drawn():
    return drawing("capacity")


def test_a_server_comes_to_rest_where_the_page_says(page, lab):
    for rate in (2, 5, 10, 13):
        rest = page["rest"](rate)
        assert rest.batch == pytest.approx(rate * page["answer"] * rest.tpot)
        assert page["naive"](rate) < rest.batch < lab[f"inside_{rate}"] == pytest.approx(rest.batch, rel=0.15)
        assert lab[f"tpot_{rate}"] == pytest.approx(rest.tpot, rel=0.1)
    assert page["rest"](16).batch is None
    assert 0 < 1 - 16 * page["one_prompt"] < 0.2


def test_the_figure_draws_the_page_s_server(page, drawn):
    rest = page["rest"](13)
    low, high = (drawn.inside(13, n) for n in (int(rest.batch), int(rest.batch) + 1))
    assert low < int(rest.batch) + 1 and high == pytest.approx(rest.batch, rel=0.02)
    loads, firsts = drawn.minutes()
    assert firsts.index(max(firsts)) == 42 and max(firsts) == pytest.approx(27, abs=0.6)
    assert next(m for m in range(60) if loads[m] > 1) == 35 and max(firsts[:35]) < 1 > max(firsts[47:])


def test_the_hour(page, lab, drawn):
    loads, _ = drawn.minutes()
    assert lab["over"] == sum(load > 1 for load in loads) == 8
    assert lab["busy"] == pytest.approx(0.59, abs=5e-3) and lab["rate"] == pytest.approx(page["mean_rate"], rel=0.01)
    assert lab["one_p90"] > 30 * lab["random_p90"] and lab["one_p50"] < 0.3
    assert lab["two_p90"] < lab["random_p90"] and lab["two_p99"] < 1
    for load in (0.5, 0.7, 0.8, 0.9):
        assert lab[f"wait_{round(100 * load)}"] == pytest.approx(page["md1_wait"](load, 1), rel=0.03)


def test_the_70b_s_decision(page):
    by, way, far = page["by"], page["way"], page["far"]
    cuts = [by[page[name]] for name in ("tp2", "tp4", "tp8")]
    assert all(a.tpot > b.tpot and a.per_card > b.per_card for a, b in pairwise(cuts))
    assert page["narrow"].chosen.cards < page["best"].chosen.cards < page["peak"].chosen.cards <= 8
    over, row, copy = (way[page[name]] for name in ("tp16", "row", "tp8"))
    assert page["near16"].tpot < copy.tpot < over.tpot and over.rate.rate < 1.3 * copy.rate.rate
    assert all(some[page["row"]].rate.rate > 0.9 * 2 * some[page["tp8"]].rate.rate for some in (way, far))
    assert row.room.requests > 2 * copy.room.requests and row.rate.rate < 2 * copy.rate.rate
    assert far[page["tp16"]].rate.rate < 1.3 * far[page["tp8"]].rate.rate
    assert 200 <= page["requests_that_fit"](64 * 2**30, page["llama"], 8192, page["tp8"]) == 204


def test_deepseek_s_day_closes(page):
    fleet = page["fleet"]
    assert fleet.cards / 8 == pytest.approx(page["reported"], rel=1e-3)
    assert page["reported"] * 8 * 2 * 24 == 87_072
    assert page["streams"] / fleet.decode.instances == pytest.approx(705, rel=1e-3)
    assert page["a_node"] == pytest.approx(fleet.prefill.each * (1 - fleet.hits), rel=0.1)
    assert (page["prefill"].world_size, page["decode"].world_size) == (32, 320)


def test_six_verdicts_and_one(page, lab):
    names = ("no_reason", "idle", "soon", "big", "full", "much", "slow")
    assert [(page[name].more, page[name].reason) for name in names] == [
        (False, "fits and fast enough"), (False, "traffic too low"), (False, "latency already met"),
        (True, "does not fit"), (True, "concurrency"), (True, "peak throughput"), (True, "latency")]
    assert lab["no"] == 3
