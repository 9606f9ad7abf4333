"""Bundled models are their published configs."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from shardlab.specs import ModelSpec, bundled_models, find_model, format_of

CONFIGS = Path(__file__).parent.parent / "data" / "configs"


UNSAID = {"gpt2": {"stored": "fp32"}, "gpt-3-175b": {"stored": "fp16"},  # what the configs here don't tell
          "gpt-oss-120b": {"stored": "mxfp4", "torch_dtype": "bfloat16"}}


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.json")))
def test_a_bundled_model_is_its_published_config(name):
    published = ModelSpec.from_config(CONFIGS / f"{name}.json")
    assert find_model(name) == replace(published, name=name, **UNSAID.get(name, {}))


@pytest.mark.parametrize("name", bundled_models())
def test_every_bundled_model_has_a_source_a_date_and_a_format(name):
    """FAULTS 27: what a market offers goes out of date."""
    assert bundled_models()[name]["source"]
    assert re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])", bundled_models()[name]["date"])
    assert format_of(find_model(name).stored)


def test_an_unknown_name_is_met_with_the_nearest():
    with pytest.raises(ValueError, match=r"llama-3\.1-70b"):
        find_model("llama-70b")


def test_a_name_is_found_in_any_case():
    assert find_model("Llama-3.1-70B") == find_model("llama-3.1-70b")
