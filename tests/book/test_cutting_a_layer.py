"""Chapter 5 predicts what lab 5 ran: its model, links and sizes are the lab's, and what is exact is equal."""


import pytest
from chapters import figures_of, numbers_of

MODES = {False: "", "keep": "_keep", "again": "_again"}


@pytest.fixture(scope="module")
def page():
    return numbers_of("05_tensor")


@pytest.fixture(scope="module")
def lab():
    return figures_of("05_tensor")


def test_both_have_the_same_links_and_waits(page, lab):
    for place in ("inside", "between"):
        link = page[f"lab_{place}"]
        assert (link.alpha, link.per_direction) == (lab[f"{place}_alpha"], lab[f"{place}_beta"])
    for how in page["ways"]:
        for what in page["work"]:
            assert page["waits"](how, what) == pytest.approx(lab[f"{what}_{how}_predicted"])


@pytest.mark.parametrize("mode", MODES)
def test_what_is_exact_is_equal(page, lab, mode):
    step, name = page["toy_step"][mode], MODES[mode]
    assert lab[f"forward{name}"] == step.wire(phase="forward")
    assert lab[f"step{name}"] == step.wire()
    assert lab[f"kept{name}"] == page["toy_kept"][mode]


def test_a_model_read_in_slices_is_read_once(lab):
    assert lab["read"] == lab["held"] < lab["held_alone"] / 2
