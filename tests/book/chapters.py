"""What the tests of a chapter read: the numbers that its page computes, its lab's, and what draws its figures."""

import importlib.util
import json
from pathlib import Path

import yaml
from computed import fresh, recorded
from pages import read

ROOT = Path(__file__).parents[2]
FACTS = {fact["id"]: fact["expected"] for fact in yaml.safe_load((ROOT / "tests" / "data" / "facts.yaml").read_text())}


def numbers_of(chapter):
    """All names that the page knows at its end."""
    known = fresh()
    for block in read((ROOT / "book" / f"{chapter}.md").read_text(encoding="utf-8")).all("numbers"):
        exec("\n".join(block.body), known)
    return known


def notebook_of(chapter):
    return json.loads((ROOT / "labs" / f"{chapter}.ipynb").read_text(encoding="utf-8"))


def figures_of(chapter):
    """What the lab has recorded, name → number."""
    return recorded(notebook_of(chapter))["figures"]


def drawing(name):
    """The script book/figures/NAME.py, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "book" / "figures" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
