"""Chapter 5 predicts what lab 5 ran: its model, links and sizes are the lab's, and what is exact is equal."""

import json
from pathlib import Path

import pytest
from computed import fresh, recorded
from pages import read

ROOT = Path(__file__).parents[2]
MODES = {False: "", "keep": "_keep", "again": "_again"}


@pytest.fixture(scope="module")
def page():
    known = fresh()
    for block in read((ROOT / "book" / "05_tensor.md").read_text(encoding="utf-8")).all("numbers"):
        exec("\n".join(block.body), known)
    return known


@pytest.fixture(scope="module")
def lab():
    return recorded(json.loads((ROOT / "labs" / "05_tensor.ipynb").read_text(encoding="utf-8")))["figures"]


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
