"""The rows of tests/data/facts.yaml, and what the files beside this one compute them with."""

import re
from dataclasses import replace
from pathlib import Path

import yaml
from formats import write

from shardlab.specs import Layout, find_model, format_of

DATA = Path(__file__).parents[1] / "data"
ROWS = {row["id"]: row for row in yaml.safe_load((DATA / "facts.yaml").read_text(encoding="utf-8"))}
KIB, MIB, GIB, GB, TB = 2**10, 2**20, 2**30, 10**9, 10**12
US, MS = 1e-6, 1e-3

EIGHT = Layout(tp=8)
SMALL, SEVENTY, V3, V4 = (find_model(name) for name in (
    "llama-3.1-8b", "llama-3.1-70b", "deepseek-v3", "deepseek-v4-pro"))


def model(name, **changes):
    """A bundled model, with other sizes where they are given."""
    return replace(find_model(name), **changes)


def stored(parameters, dtype):
    """Bytes of so many parameters in a plain format: for models known by a round number of them."""
    return format_of(dtype).rest.nbytes((int(parameters),))


def shown(value, form):
    """The number that the book's format `form` shows of `value`."""
    return float(re.match(r"[\d.,]+", write(value, form))[0].replace(",", ""))
