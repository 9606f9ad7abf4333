"""Chapter 3 predicts what lab 3 ran: what it computes with is what the lab recorded."""


import pytest
from chapters import figures_of, numbers_of


@pytest.fixture(scope="module")
def page():
    return numbers_of("03_collectives")


@pytest.fixture(scope="module")
def lab():
    return figures_of("03_collectives")


def test_both_have_the_same_link_and_sizes(page, lab):
    assert (page["lab"].alpha, page["lab"].per_direction) == (lab["link_alpha"], lab["link_beta"])
    assert [page[name] for name in ("small", "large", "odd", "pair_bytes")] == [
        lab[name] for name in ("small", "large", "ring_payload", "two_level_bytes")]


def test_what_is_exact_is_equal(page, lab):
    assert [page["leaves"](how) for how in ("ring", "two_level")] == [lab["crossed_flat"], lab["crossed_two_level"]]
    assert [2 * (p - 1) * page["odd"] for p in (2, 3, 4)] == [lab[f"ring_wire_{p}"] for p in (2, 3, 4)]
    assert page["hops"]("all_reduce", "ring", 4) == lab["ring_messages_4"]
    assert page["gain"] == pytest.approx(lab["two_level_predicted"])
