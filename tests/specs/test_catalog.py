"""Bundled models are their published configs."""

from dataclasses import replace
from pathlib import Path

import pytest

from shardlab.specs import ModelSpec, bundled_models, find_model

CONFIGS = Path(__file__).parent.parent / "data" / "configs"


@pytest.mark.parametrize("name", bundled_models())
def test_a_bundled_model_is_its_published_config(name):
    published = ModelSpec.from_config(CONFIGS / f"{name}.json")
    assert find_model(name) == replace(published, name=name)
    assert bundled_models()[name]["source"] and bundled_models()[name]["date"]


def test_an_unknown_name_is_met_with_the_nearest():
    with pytest.raises(ValueError, match=r"llama-3\.1-70b"):
        find_model("llama-70b")


def test_a_name_is_found_in_any_case():
    assert find_model("Llama-3.1-70B") == find_model("llama-3.1-70b")
