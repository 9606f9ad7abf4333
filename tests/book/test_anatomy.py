"""Every chapter and every lab has its parts; and the checker misses each part that is taken away."""

import copy
import json
from pathlib import Path

import pytest
from anatomy import chapter, lab
from set_repository import CONFIG, read, setup_cell

ROOT = Path(__file__).parents[2]
CHAPTERS = sorted((ROOT / "book").glob("[0-9]*.md"))
LABS = sorted((ROOT / "labs").glob("*.ipynb"))


def source(path):
    return (ROOT / "book" / path).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.name)
def test_a_chapter_has_its_parts(path):
    assert chapter(path.read_text(encoding="utf-8"), source) == []


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.name)
def test_a_lab_has_its_parts(path):
    setup = setup_cell(read((ROOT / CONFIG).read_text())[0])
    assert lab(json.loads(path.read_text(encoding="utf-8")), setup) == []


def test_chapters_and_labs_pair_up():
    assert {path.stem for path in CHAPTERS} == {path.stem for path in LABS}


def test_what_is_here_is_in_the_contents_and_linked_from_the_introduction():
    contents, introduction = (ROOT / "_toc.yml").read_text(), (ROOT / "book" / "index.md").read_text(encoding="utf-8")
    for path in [*CHAPTERS, *LABS]:
        assert f"file: {path.parent.name}/{path.stem}" in contents
        assert path.name in introduction


EXERCISE = """
```{{exercise}} Heads
:label: ex-{0}
Difficulty: one line. How many?
```

```{{solution}} ex-{0}
:class: dropdown
Eight.
```
"""
CHAPTER = """---
title: x
---

# A chapter

:::{admonition} Before you read on
:class: question

How many cards?
:::

## One section

```{figure} figures/x.svg
:alt: Two ranks with a matrix each.

A caption.
```

```{literalinclude} ../src/shardlab/x.py
:pyobject: cut
```

```python
print("a call of the library")
```

## When not to

## Exercises
""" + "".join(map(EXERCISE.format, "abc")) + """
## Summary

**References**: {cite:t}`x` has it.
"""
LIBRARY = "def cut(model):\n    for layer in model:\n        split(layer)\n    return model\n"


def test_a_whole_chapter_passes():
    assert chapter(CHAPTER, lambda path: LIBRARY) == []


@pytest.mark.parametrize(("old", "new", "said"), [
    (":class: question", ":class: note", "no question"),
    ("How many cards?", "Many cards.", "asks nothing"),
    ("## One section", "", "no question before the first section"),
    (":alt: Two ranks with a matrix each.", "", "needs an :alt:"),
    ("```{figure} figures/x.svg\n:alt: Two ranks with a matrix each.\n\nA caption.\n```", "", "no figure"),
    ("../src/shardlab/x.py", "figures/x.py", "no code of the library"),
    (":pyobject: cut", ":lines: 1-4", "line numbers"),
    ('print("a call of the library")', "for layer in model:\n    split(layer)\nreturn model", "pasted"),
    ("## When not to", "## When to", "## When not to"),
    ("## Summary", "", "## Summary"),
    ("**References**: {cite:t}`x`", "It", "no references"),
    ("{cite:t}`x`", "Somebody", "no references"),
    (EXERCISE.format("c"), "", "2 exercises"),
    ("```{solution} ex-b", "```{note} ex-b", "ex-b has no {solution}"),
    (":label: ex-a", "", "no :label:"),
    ("Difficulty: one line. ", "", "Difficulty"),
    (":class: dropdown", "", "fold the solution"),
])
def test_a_missing_part_is_missed(old, new, said):
    assert old in CHAPTER
    found = chapter(CHAPTER.replace(old, new) if old != "## One section" else CHAPTER.replace(
        ":::{admonition}", "## First\n\n:::{admonition}"), lambda path: LIBRARY)
    assert any(said in sentence for sentence in found), found


def cell(kind, text, *tags):
    made = {"cell_type": kind, "source": text.splitlines(keepends=True), "metadata": {"tags": list(tags)}}
    return made | ({"execution_count": 0, "outputs": []} if kind == "code" else {})


def notebook():
    cells = [
        cell("markdown", "# Lab\n\nIt takes 20 minutes."), cell("code", "setup()", "setup"),
        cell("markdown", "## One"), cell("code", "guess = 3", "predict"), cell("code", "run()", "run"),
        cell("code", "# NBVAL_CHECK_OUTPUT\ncompare()", "compare"),
        cell("markdown", "## Two\n\ntext"), cell("code", "broken()", "repair"),
        cell("code", "# NBVAL_CHECK_OUTPUT\ncheck()"),
        cell("markdown", "## What you have seen"),
    ]
    for count, each in enumerate([each for each in cells if each["cell_type"] == "code"], start=1):
        each["execution_count"] = count
    return {"cells": cells}


def test_a_whole_lab_passes():
    assert lab(notebook(), "setup()") == []


@pytest.mark.parametrize(("change", "said"), [
    (lambda cells: cells.pop(0), "opens with its title"),
    (lambda cells: cells[0].update(source="# Lab"), "how long"),
    (lambda cells: cells.pop(1), "not the one tagged 'setup'"),
    (lambda cells: cells[1].update(source="other()"), "out of date"),
    (lambda cells: cells.pop(3), "no cell tagged 'predict'"),
    (lambda cells: cells.insert(3, cells.pop(4)), "before the first 'predict'"),
    (lambda cells: cells[5]["metadata"].clear(), "no cell tagged 'compare'"),
    (lambda cells: cells.pop(7), "nothing to do"),
    (lambda cells: cells.pop(7), "Two: the reader changes nothing"),
    (lambda cells: cells.pop(8), "Two: no exact cell"),
    (lambda cells: cells[4].update(source="x\n" * 41), "cell 5: 42 lines"),
    (lambda cells: cells[4].update(execution_count=9), "not of one run"),
    (lambda cells: cells[4].update(outputs=[{"output_type": "error", "ename": "KeyError"}]), "KeyError"),
])
def test_a_missing_part_of_a_lab_is_missed(change, said):
    changed = copy.deepcopy(notebook())
    change(changed["cells"])
    found = lab(changed, "setup()")
    assert any(said in sentence for sentence in found), found
