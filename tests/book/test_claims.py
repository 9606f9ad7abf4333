"""Claims checked: every wrong claim of the facts stands on the page once, with the figures of its row."""

import re
from collections import Counter
from io import StringIO
from pathlib import Path

import pytest
import yaml
from computed import fresh, split
from pages import read
from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace, patch_docutils

ROOT = Path(__file__).parents[2]
PAGE = read((ROOT / "book" / "claims.md").read_text(encoding="utf-8"))
CLAIMS = {claim.argument: "\n".join(claim.body) for claim in PAGE.all("claim")}
ROWS = {row["id"]: row for row in yaml.safe_load((ROOT / "tests" / "data" / "facts.yaml").read_text(encoding="utf-8"))}
ONE = {"x": 1, "x faster": 1, "per layer": 1, "cards": 1, "requests": 1, "heads": 1, "KV heads": 1, "experts": 1,
       "fraction": 1, "params": 1, "1e9 params": 1e9, "B": 1, "B/token": 1, "KiB": 2**10, "MiB": 2**20,
       "MiB (printed MB)": 2**20, "GiB": 2**30, "GB": 1e9, "GB (1e9)": 1e9, "1e9 B/s": 1e9, "us": 1e-6,
       "ms": 1e-3}  # what a row's unit is in the book's own


@pytest.fixture(scope="module")
def names():
    known = fresh()
    for block in PAGE.all("numbers"):
        exec("\n".join(block.body), known)
    return known


def figure(text, role, names):
    """The number that a role in a claim computes."""
    return eval(split(re.search(rf"\{{{role}\}}`([^`]+)`", text)[1])[0], names)


def test_every_wrong_claim_stands_on_the_page_once():
    wrong = [name for name, row in ROWS.items() if row.get("verdict") == "wrong"]
    assert Counter(claim.argument for claim in PAGE.all("claim")) == Counter(wrong)


@pytest.mark.parametrize("name", CLAIMS)
def test_the_figures_are_the_rows(name, names):
    row, text = ROWS[name], CLAIMS[name]
    one = ONE[row["unit"]]
    assert figure(text, "said", names) == pytest.approx(row["claimed"] * one, rel=0.04)
    assert figure(text, "right", names) == pytest.approx(row["expected"] * one, rel=max(row["rel_tol"], 0.005))
    assert text.lstrip().startswith('"') and len(re.split(r"\n\s*\n", text.strip())) == 2, "what is said, then why not"


def build(folder, text):
    """The page of a book of that text alone, and the warnings of its build."""
    (folder / "conf.py").write_text("extensions = ['myst_nb', 'computed', 'claims']\nnb_execution_mode = 'off'\n")
    (folder / "index.md").write_text(text)
    warnings, out = StringIO(), folder / "out"
    with patch_docutils(), docutils_namespace():
        Sphinx(folder, folder, out, folder / "trees", "html", status=StringIO(), warning=warnings).build()
    return (out / "index.html").read_text(), warnings.getvalue()


def test_a_claim_has_its_address_and_both_figures(tmp_path):
    html, warnings = build(tmp_path, "# T\n\n```{claim} A1-x\n{said}`2 * 16 | KiB`?\n\nIt is {right}`28 | B`.\n```")
    assert warnings == ""
    assert re.search(r'<div class="claim[^"]*" id="a1-x">', html)
    assert re.search(r'<span class="num said">[\d.]+\sKiB</span>', html)
    assert re.search(r'<span class="num right">28\sB</span>', html)


@pytest.mark.parametrize(("body", "said"), [
    ("It is {said}`1 | GB`.", "needs one {right}, and has 0"),
    ("{said}`1 | GB`, {said}`2 | GB`, {right}`3 | GB`.", "needs one {said}, and has 2"),
    ("{said}`1 | GB`, {right}`nothing | GB`.", "NameError"),
])
def test_a_claim_without_its_figures_fails_the_build(tmp_path, body, said):
    _, warnings = build(tmp_path, f"# T\n\n```{{claim}} A1\n{body}\n```")
    assert "index.md:" in warnings and said in warnings
