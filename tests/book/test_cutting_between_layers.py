"""Chapter 6 predicts what lab 6 ran: the same schedules, and what is counted is equal."""


import pytest
from chapters import figures_of, numbers_of

SCHEDULES = {"gpipe": (), "1f1b": (), "interleaved": (2,), "zero_bubble": ()}


@pytest.fixture(scope="module")
def page():
    return numbers_of("06_pipeline")


@pytest.fixture(scope="module")
def lab():
    return figures_of("06_pipeline")


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_same_schedules_are_predicted_and_what_is_counted_is_equal(page, lab, name):
    plan = page["plan"](name, 4, lab["microbatches"], *SCHEDULES[name])
    assert lab[f"{name}_total_predicted"] == pytest.approx(plan.bubble_over_total)
    assert lab[f"{name}_ideal_predicted"] == pytest.approx(plan.bubble_over_ideal)
    assert lab[f"{name}_sends"] == page["sends"](name, *SCHEDULES[name])
    assert [lab[f"{name}_held_{rank}"] for rank in (0, 3)] == [plan.live[0], plan.live[3]]


def test_ratios_are_of_one_kind(page, lab):
    for name in SCHEDULES:
        total, ideal = lab[f"{name}_total"], lab[f"{name}_ideal"]
        assert total == pytest.approx(ideal / (1 + ideal))
    assert (lab["too_large"], lab["too_large_adamw"]) == (4, 1)


def test_the_published_mistakes_are_those_of_the_claims(page):
    assert page["published"].bubble_over_ideal == 15 / 32
    assert page["wrong"] == pytest.approx(0.06, abs=0.002)
    assert page["refused"](page["naive"]).startswith("deadlock")
    assert page["lists"][1, 1, 1][0] == page["lists"][1, 1, 1][1]
    assert all(by_list != formula for times, (by_list, formula) in page["lists"].items() if times != (1, 1, 1))
