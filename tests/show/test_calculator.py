"""The calculator says what `cost.serving` says, for every setting of its controls."""

import re

import pytest
from ipywidgets import HTML
from traitlets import TraitError

from shardlab.cost import serving
from shardlab.show import calculator
from shardlab.show.calculator import reply
from shardlab.specs import Layout, find_card, find_model, units

EIGHT = {"model": "llama-3.1-70b", "dtype": "bf16", "card": "h100", "cards": 8, "context": 8192, "concurrency": 128}


def test_the_answer_is_the_bill():
    bill = serving(find_model("llama-3.1-70b"), Layout(tp=8), context=8192, concurrency=128, dtype="bf16")
    said = reply(**EIGHT)
    assert "<b>fits</b>" in said
    for nbytes in (bill.weights, bill.part("KV cache"), bill.per_rank, find_card("h100").memory):
        assert units.decimal(nbytes, 4) in said
    assert f"{bill.weights * 100 / find_card('h100').memory:.2f}%" in said, "the bar is to the scale of the card"


@pytest.mark.parametrize(("change", "verdict"), [
    ({"concurrency": 256}, "<b>does not fit</b>: 198 such requests would"),
    ({"cards": 1}, "<b>does not fit</b>: the weights alone are too large"),
    ({"model": "llama-3.1-8b", "cards": 16, "card": "a100"}, "<b>fits</b>"),
    ({"model": "smollm2-135m"}, "<b>can't be done so:</b>"),
    ({"context": 131072, "model": "llama-2-7b"}, "<b>"),
])
def test_verdicts(change, verdict):
    assert verdict in reply(**EIGHT | change)


def test_moving_a_control_answers_anew():
    box = calculator(**EIGHT)
    controls, answer = {c.description: c for c in box.children[:-1]}, box.children[-1]
    assert isinstance(answer, HTML)
    assert answer.value == reply(**EIGHT)
    controls["concurrency"].value = 256
    assert "198 such requests" in answer.value
    assert list(controls) == list(EIGHT)


def test_every_model_and_format_has_an_answer():
    box = calculator()
    models, formats = (next(c for c in box.children if c.description == name).options for name in ("model", "dtype"))
    for model in models:
        for dtype in formats:
            said = reply(**EIGHT | {"model": model, "dtype": dtype})
            assert re.search(r"<b>(fits|does not fit|can't be done so:)</b>", said)


def test_a_start_that_is_no_choice_is_refused():
    with pytest.raises(TraitError, match="Invalid selection"):
        calculator(model="llama-4")
