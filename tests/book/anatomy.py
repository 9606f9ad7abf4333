"""What a chapter and a lab are made of (the book's plan), as two checks that return what is missing.

Pure: a page's text or a notebook's JSON in, sentences out. No sentence means that all is there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from pages import Directive, Page, read
from prose import CITE

LINES_A_CELL = 40
EXACT = "# NBVAL_CHECK_OUTPUT"


def chapter(text: str, source: Callable[[str], str]) -> list[str]:
    """What is missing or wrong in a chapter. `source(path)` is the text of a library file that it includes."""
    page = read(text)
    return [*question(page), *figures(page), *code(page, source), *sections(page), *exercises(page)]


def question(page: Page) -> Iterator[str]:
    """An admonition of class `question` before the first section, with a question mark in it."""
    first_section = next((line for line, level, _ in page.headings if level == 2), 0)
    asked = [d for d in page.all("admonition") if "question" in d.options.get("class", "") and d.line < first_section]
    if not asked:
        yield "no question before the first section: {admonition} with :class: question"
    elif "?" not in "\n".join(asked[0].body):
        yield f"line {asked[0].line}: the opening question asks nothing"


def figures(page: Page) -> Iterator[str]:
    """At least one figure, and words for those who don't see it."""
    drawn = page.all("figure", "image")
    if not drawn:
        yield "no figure"
    for each in drawn:
        if len(each.options.get("alt", "").split()) < 5:
            yield f"line {each.line}: {each.argument} needs an :alt: that says what it shows"


def code(page: Page, source: Callable[[str], str]) -> Iterator[str]:
    """Code of the library is included by name, so that it is what runs; never pasted, and not by line numbers."""
    included = page.all("literalinclude")
    if not any("src/shardlab/" in each.argument for each in included):
        yield "no code of the library: {literalinclude} ../src/shardlab/… with :pyobject:"
    for each in included:
        if "lines" in each.options:
            yield f"line {each.line}: include by :pyobject: or :start-after:, line numbers go out of date"
    library = [significant(source(each.argument).splitlines()) for each in included]
    for each in page.directives:
        if not each.name and "shell" not in each.argument and any(pasted(each, file) for file in library):
            yield f"line {each.line}: this code is pasted from the library: include it"


def significant(lines: list[str]) -> list[str]:
    """Lines without indentation and without empty ones."""
    return [line.strip() for line in lines if line.strip()]


def pasted(block: Directive, file: list[str], run: int = 3) -> bool:
    """Whether so many lines of a block follow one another in a file too."""
    lines = significant(block.body)
    stretches = {tuple(file[i : i + run]) for i in range(len(file) - run + 1)}
    return any(tuple(lines[i : i + run]) in stretches for i in range(len(lines) - run + 1))


def sections(page: Page) -> Iterator[str]:
    """One title; the sections that every chapter has; references, cited under that word."""
    if sum(level == 1 for _, level, _ in page.headings) != 1:
        yield "a chapter has one title (#)"
    titles = [title for _, level, title in page.headings if level == 2]
    for wanted in ("When not to", "Exercises", "Summary"):
        if not any(title.startswith(wanted) for title in titles):
            yield f"no section ## {wanted}"
    last = [block.text for block in page.blocks if re.search(r"(?m)^(#+ |\*\*)References", block.text)]
    if not any(CITE.search(text) for text in last):
        yield "no references: a paragraph that begins with **References** and cites them"


def exercises(page: Page) -> Iterator[str]:
    """At least three, each with a label, a difficulty and a solution that is folded."""
    asked = page.all("exercise")
    if len(asked) < 3:
        yield f"{len(asked)} exercises: at least 3"
    solved = {each.argument: each for each in page.all("solution")}
    for each in asked:
        label = each.options.get("label")
        if not label:
            yield f"line {each.line}: the exercise has no :label:"
        elif label not in solved:
            yield f"line {each.line}: exercise {label} has no {{solution}}"
        elif "dropdown" not in solved[label].options.get("class", ""):
            yield f"line {solved[label].line}: fold the solution: :class: dropdown"
        if not "\n".join(each.body).lstrip().startswith("Difficulty:"):
            yield f"line {each.line}: the exercise starts with its Difficulty:"


def lab(notebook: dict[str, Any], setup: str) -> list[str]:
    """What is missing or wrong in a lab. `setup` is the source that its setup cell has to have."""
    cells = notebook["cells"]
    return [*opening(cells, setup), *steps(cells), *lab_sections(cells), *every_cell(cells)]


def opening(cells: list[dict], setup: str) -> Iterator[str]:
    """A title, how long it takes, and the setup cell before any other code."""
    if not cells or cells[0]["cell_type"] != "markdown" or not text_of(cells[0]).startswith("# "):
        yield "cell 1: a lab opens with its title and what you will find out"
    elif not re.search(r"\b(minutes?|hours?)\b", text_of(cells[0])):
        yield "cell 1: say how long the lab takes"
    first = next((cell for cell in cells if cell["cell_type"] == "code"), None)
    if first is None or "setup" not in tags(first):
        yield "the first code cell is not the one tagged 'setup'"
    elif text_of(first) != setup:
        yield "the setup cell is out of date: run `make set-repository`"


def steps(cells: list[dict]) -> Iterator[str]:
    """Predict, then run, then compare, by tag; and something to change or to repair."""
    tagged = [tag for cell in cells for tag in tags(cell)]
    for tag in ("predict", "run", "compare"):
        if tag not in tagged:
            yield f"no cell tagged {tag!r}"
    order = [tag for tag in tagged if tag in ("predict", "run", "compare")]
    if order and order[0] != "predict":
        yield f"{order[0]!r} comes before the first 'predict'"
    if not {"change", "repair"} & set(tagged):
        yield "nothing to do: no cell tagged 'change' or 'repair'"


def lab_sections(cells: list[dict]) -> Iterator[str]:
    """In every section that runs something: what the reader changes, and a cell whose output is exact.

    A section that only hands its figures to the page (tag 'measured') is none of these.
    """
    for title, section in by_section(cells):
        code_cells = [cell for cell in section if cell["cell_type"] == "code" and "measured" not in tags(cell)]
        if not code_cells:
            continue
        if not any({"predict", "change", "repair"} & set(tags(cell)) for cell in code_cells):
            yield f"{title}: the reader changes nothing (tags 'predict', 'change', 'repair')"
        if not any(EXACT in text_of(cell) for cell in code_cells):
            yield f"{title}: no exact cell ({EXACT})"


def by_section(cells: list[dict]) -> Iterator[tuple[str, list[dict]]]:
    """(title, cells) of each section that begins with a cell starting in `## `; what stands before them is left out."""
    section: list[dict] | None = None
    title = ""
    for cell in cells:
        if cell["cell_type"] == "markdown" and (heading := re.match(r"## (.*)", text_of(cell))):
            if section is not None:
                yield title, section
            title, section = heading[1], []
        elif section is not None:
            section.append(cell)
    if section is not None:
        yield title, section


def every_cell(cells: list[dict]) -> Iterator[str]:
    """No cell is longer than a screen; every code cell has been run, in order, and none has failed."""
    counts = [cell["execution_count"] for cell in cells if cell["cell_type"] == "code"]
    if counts != list(range(1, len(counts) + 1)):
        yield "the committed outputs are not of one run from top to bottom: run `make labs`"
    for number, cell in enumerate(cells, start=1):
        lines = text_of(cell).count("\n") + 1
        if lines > LINES_A_CELL:
            yield f"cell {number}: {lines} lines, at most {LINES_A_CELL}"
        failed = [out for out in cell.get("outputs", []) if out["output_type"] == "error"]
        if failed and "raises-exception" not in tags(cell):
            yield f"cell {number}: its committed output is a failure: {failed[0]['ename']}"


def text_of(cell: dict) -> str:
    """A cell's source: notebooks hold a string or a list of lines."""
    return "".join(cell["source"])


def tags(cell: dict) -> list[str]:
    """A cell's tags."""
    return cell["metadata"].get("tags", [])
