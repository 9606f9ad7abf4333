"""Numbers in the prose are computed or quoted; and the checker that says so sees what it should."""

from pathlib import Path

import pytest
import yaml
from prose import problems, typed_numbers, undated

BOOK = Path(__file__).parents[2] / "book"
PAGES = sorted(BOOK.glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_numbers_are_computed_or_quoted(page):
    allowed = yaml.safe_load((BOOK / "numbers_allow.yml").read_text())
    assert not problems(page.name, page.read_text(encoding="utf-8"), allowed)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_is_said_of_the_present_is_dated(page):
    assert undated(page.read_text(encoding="utf-8")) == []


def test_every_allowed_number_has_a_page_and_a_reason():
    allowed = yaml.safe_load((BOOK / "numbers_allow.yml").read_text())
    assert len(allowed) <= 20
    for entry in allowed:
        assert set(entry) == {"page", "number", "why"}
        assert len(entry["why"].split()) >= 3
        assert (BOOK / entry["page"]).exists()


@pytest.mark.parametrize(("text", "numbers"), [
    ("A vector of 16 KiB.", ["16 KiB"]),
    ("A vector of 16KiB.", ["16KiB"]),
    ("It is 2× as long.", ["2×"]),
    ("It is 2 × as long.", ["2 ×"]),
    ("It is 1.4x slower.", ["1.4x"]),
    ("It is ×2 faster.", ["×2"]),
    ("It reaches 85 % of it.", ["85 %"]),
    ("It reaches 85% of it.", ["85%"]),
    ("NVLink has 450 GB/s.", ["450 GB/s"]),
    ("A port of 400 Gbit/s.", ["400 Gbit/s"]),
    ("After 36 nanoseconds, or 29 µs, or 1.5e-3 s.", ["36 nanoseconds", "29 µs", "1.5e-3 s"]),
    ("An 80-GB card", ["80-GB"]),
    ("1,024 bytes and 16 B", ["1,024 bytes", "16 B"]),
    ("It has 671 billion parameters.", ["671 billion"]),
    ("989 TFLOP/s dense", ["989 TFLOP/s"]),
    ("- one\n- takes 10 ms\n", ["10 ms"]),
    ("| a | 3 GB |\n|---|---|\n", ["3 GB"]),
    ("```{figure} x.svg\n:alt: of 3 GB\n\nA caption of 4 GB.\n```", ["4 GB"]),
    (":::{admonition} Takes 5 GB\n:class: question\nHolds 6 GB.\n:::", ["5 GB", "6 GB"]),
    ("````{exercise} Size\n:label: x\n\nIt has 7 GB.\n```python\nx = '8 GB'\n```\nAnd 9 GB.\n````", ["7 GB", "9 GB"]),
    ("# A title of 3 GB", ["3 GB"]),
    ("It costs 10 ms. {cite:p}`x` says less.", ["10 ms"]),
])
def test_a_typed_number_is_seen(text, numbers):
    assert [number for _, number in typed_numbers(text)] == numbers


@pytest.mark.parametrize("text", [
    "A vector of {num}`x | KiB`.",
    "It took {measured}`05_tensor.time | s` here.",
    "The prompt `16 KiB` and ``2x`` and {num}`1 + 2 | GB`.",
    "The term $2 GB$ and $$ 3 GB \\times 2 $$ too.",
    "```python\nx = '16 KiB'\n```",
    "```{numbers}\ncard = 80e9  # 80 GB\n```",
    "```{math}\n3 GB\n```",
    "Measured on eight cards it is 29 microseconds {cite:p}`nccl`.",
    "> The links have 450 GB/s. They are fast.\n> {footcite:p}`x`",
    "Llama 3.1 70B has 80 layers, 64 heads, a vocabulary of 128,256, TP8.",
    "That is 1 × 1 × {num}`hidden | count` × 2.",
    "See [the page](https://x.org/16 KiB/85%) and <https://x.org/2x>.",
    "---\ntitle: of 16 KiB\n---\n",
    "<!-- was 16 KiB -->",
    "Chapter 3 has 5 sections, 2 figures and 3 x-axes. In 2024 it had 4 bibliographies.",
    "float32 and bf16 have 4 and 2.",
])
def test_what_is_no_typed_number_is_left_alone(text):
    assert typed_numbers(text) == []


def test_the_line_is_right():
    assert typed_numbers("---\ntitle: x\n---\n\n# T\n\nOne.\nTwo. It has\n3 GB.\n") == [(8, "3 GB")]


def test_an_allowed_number_has_to_be_there():
    entry = {"page": "a.md", "number": "60 s", "why": "the limit"}
    assert problems("a.md", "Under 60 s.", [entry]) == []
    assert "no longer there" in problems("a.md", "Fast.", [entry])[0]
    assert "'60 s' is typed" in problems("b.md", "Under 60 s.", [entry])[0]


@pytest.mark.parametrize(("text", "words"), [
    ("Cards have plenty of memory nowadays.", ["nowadays"]),
    ("One.\nTwo. Today's cards have more.", ["Today's"]),
    ("In 2026 cards have plenty. The latest has more.", ["The latest"]),
    ("The largest card today, in 2026, has {num}`b300.printed | GB`.", []),
    ("The newest card has more {cite:p}`x2025`.", []),
    ("`today` is a name, and a date is no market.", []),
])
def test_the_present_without_a_year_is_seen(text, words):
    """FAULTS 27, numbers that books got wrong: every market claim needs its date."""
    assert [word for _, word in undated(text)] == words
