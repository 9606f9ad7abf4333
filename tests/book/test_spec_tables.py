"""The directives that write tables from the library: every entry is in them, with the library's figures and sources."""

import re
from html import unescape

import pytest
from spec_tables import NOT_KNOWN, SOURCES, TABLES, scaled

from shardlab.specs import bundled_cards, bundled_links, bundled_models, find_card, find_link, find_model

EXTENSIONS = ["myst_nb", "computed", "spec_tables"]


def rows(html):
    """The texts of the first table's cells, by the first of each row."""
    body = re.search(r"<tbody>(.*?)</tbody>", html, re.S)[1]
    cells = [[re.sub(r"<[^>]+>", "", cell).strip() for cell in re.findall(r"<td.*?</td>", row, re.S)]
             for row in re.findall(r"<tr.*?</tr>", body, re.S)]
    return {row[0]: row[1:] for row in cells}


@pytest.mark.parametrize(("name", "known"), [
    ("models-weights", bundled_models()), ("models-shape", bundled_models()), ("cards-memory", bundled_cards()),
    ("cards-speed", bundled_cards()),
    ("links", bundled_links()),
])
def test_a_table_has_every_entry(build, name, known):
    html, warnings = build(f"# T\n\n```{{spec-table}} {name}\n```\n")
    assert warnings == ""
    found = rows(html)
    assert set(found) == set(known)
    assert all(len(row) == len(TABLES[name].columns) - 1 and all(row) for row in found.values())


def test_figures_are_the_librarys(build):
    html, _ = build("# T\n\n```{spec-table} cards-memory\n```\n")
    assert rows(html)["h100"] == ["80", "80", "81,559", "79.65", "85.52", "3,350", find_card("h100").date]
    assert rows(html)["rubin"][1:5] == [NOT_KNOWN] * 4
    html, _ = build("# T\n\n```{spec-table} links\n```\n")
    assert rows(html)["nvlink4-h800"][:2] == ["200", "400"]
    assert rows(html)["ethernet-10"][:2] == ["1.25", NOT_KNOWN] and find_link("ethernet-10").headline is None
    html, _ = build("# T\n\n```{spec-table} models-weights\n```\n")
    assert rows(html)["deepseek-v3"][:2] == [scaled(find_model("deepseek-v3").total, 10**9),
                                             scaled(find_model("deepseek-v3").active, 10**9)]


def test_bits_of_a_format_count_its_scales(build):
    html, warnings = build("# T\n\n```{spec-table} formats\n```\n")
    found = {name: row[:2] for name, row in rows(html).items()}
    assert warnings == ""
    assert found["bf16"] == ["16", NOT_KNOWN]
    assert found["int4"] == ["4.125", "1 × 128, 2 B"]
    assert found["mxfp4"] == ["4.25 / 16", "1 × 32, 1 B"]
    assert found["fp8"] == ["8.0020", "128 × 128, 4 B"]


@pytest.mark.parametrize("name", SOURCES)
def test_sources_have_every_entry_and_link_to_papers(build, name):
    html, warnings = build(f"# T\n\n```{{spec-sources}} {name}\n```\n")
    assert warnings == ""
    text = " ".join(unescape(re.sub(r"<[^>]+>", "", html)).replace("’", "'").split())
    for entry, date, source, note in SOURCES[name]():
        assert f"{entry} ({date}). {source}." in text and note[:60] in text
    if name == "links":
        assert '<a class="reference external" href="https://arxiv.org/abs/2505.09343">arXiv:2505.09343</a>' in html


@pytest.mark.parametrize(("directive", "said"), [
    ("spec-table", "no 'cars', only models-weights, models-shape, cards-memory"),
    ("spec-sources", "no 'cars', only models, cards, links"),
])
def test_another_name_is_an_error_with_its_line(build, directive, said):
    _, warnings = build(f"# T\n\n```{{{directive}}} cars\n```\n")
    assert "index.md:3: ERROR" in warnings and said in warnings


def test_what_is_not_known_is_a_dash():
    assert (scaled(None, 10**9), scaled(80 * 10**9, 10**9), scaled(450e9, 10**9)) == (NOT_KNOWN, "80", "450")
