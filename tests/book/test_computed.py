"""The roles that compute numbers, in a small Sphinx project; and how numbers are written."""

import json
import re
from io import StringIO

import pytest
from computed import recorded, split
from formats import digits, write
from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace, patch_docutils

from shardlab import show

CONF = "extensions = ['myst_nb', 'computed']\nnb_execution_mode = 'off'\nmyst_enable_extensions = ['dollarmath']\n"
LAB = {"figures": {"held": 179355648, "ratio": 1.44}, "machine": "2 cores, Linux"}


def notebook(*outputs):
    cells = [{"cell_type": "code", "source": "", "metadata": {}, "execution_count": 1, "outputs": list(outputs)}]
    return {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


def output(data):
    return {"output_type": "execute_result", "execution_count": 1, "metadata": {},
            "data": {"application/vnd.shardlab.measured+json": data, "text/plain": "x"}}


class Book:
    """A folder with a few files of a book, that builds to text and warnings."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "conf.py").write_text(CONF)
        for name in ("bench/results", "labs"):
            (folder / name).mkdir(parents=True)

    def write(self, name, content):
        (self.folder / name).write_text(content if isinstance(content, str) else json.dumps(content))

    def build(self, text=None, builder="text"):
        """The page `index.md` and the warnings of its build."""
        if text is not None:
            self.write("index.md", text)
        warnings, out = StringIO(), self.folder / "out"
        with patch_docutils(), docutils_namespace():
            app = Sphinx(self.folder, self.folder, out, self.folder / "trees", builder, status=StringIO(),
                         warning=warnings, confoverrides={"exclude_patterns": ["out", "trees", "labs", "book"]})
            app.build()
        page = (out / "index.txt").read_text() if builder == "text" else (out / "index.html").read_text()
        return page.replace("\u00a0", " "), warnings.getvalue()


@pytest.fixture
def book(tmp_path):
    return Book(tmp_path)


PAGE = """# Title

```{numbers}
llama = find_model("llama-3.1-70b")
held = memory(llama, Layout(tp=8), "bf16")
```

It has {num}`llama.layers | count` layers, {num}`held.weights | GB` each.

## A heading of {num}`2 * llama.heads | count`

| what | how much |
|---|--:|
| heads | {num}`llama.heads \\| count` |
| a bar too | {num}`4 \\| 1 \\| count` |

Beside $x$ = {num}`2**14 | KiB`, and $y$ is {num}`1.44 | ratio`, {num}`max(0.5, 0.85) | %`.
"""


def test_roles_compute_in_prose_headings_and_tables(book):
    text, warnings = book.build(PAGE)
    assert warnings == ""
    assert "It has 80 layers, 17.64 GB each." in text
    assert "A heading of 128" in text
    assert re.search(r"\| heads +\| +64 *\|", text)
    assert re.search(r"\| a bar too +\| +5 *\|", text)
    assert "16 KiB, and" in text and "1.44×, 85%" in text


@pytest.mark.parametrize(("text", "line", "said"), [
    ("# T\n\nOne.\n\nIt is {num}`nothing | GB`.", 5, "NameError"),
    ("# T\n\nIt is {num}`1 / 0 | GB`.", 3, "ZeroDivisionError"),
    ("# T\n\nIt is {num}`16`.", 3, "no format"),
    ("# T\n\nIt is {num}`16 | parsecs`.", 3, "unknown format 'parsecs'"),
    ("# T\n\nIt is {num}`2.5 | count`.", 3, "not a whole number"),
    ("# T\n\nIt is {num}`'x' | GB`.", 3, "is no number"),
    ("# T\n\n```{numbers}\na = 1\nb = nothing\n```", 5, "NameError"),
    ("# T\n\n```{numbers}\na = 1\nb = = 2\n```", 5, "SyntaxError"),
    ("# T\n\n```{numbers}\nspec = find_model('lama')\n```", 4, "no bundled model 'lama'"),
    ("# T\n\n{measured}`01_x.held | MB`", 3, "nothing was measured under '01_x'"),
])
def test_what_cannot_be_computed_is_a_warning_with_its_line(book, text, line, said):
    _, warnings = book.build(text)
    assert f"index.md:{line}: WARNING" in warnings
    assert said in warnings


def test_names_stay_on_their_page(book):
    book.write("other.md", "# O\n\n```{numbers}\nsecret = 3\n```\n")
    _, warnings = book.build("# T\n\n{num}`secret | count`\n\n```{toctree}\nother\n```")
    assert "NameError" in warnings


def test_measured_figures_come_from_the_lab(book):
    book.write("labs/05_tensor.ipynb", notebook(output(LAB)))
    text, warnings = book.build("# T\n\nHeld {measured}`05_tensor.held | MB` on {machine}`05_tensor`.")
    assert (warnings, "Held 179.4 MB on 2 cores, Linux." in text) == ("", True)
    _, warnings = book.build("# T\n\n{measured}`05_tensor.gone | MB`")
    assert "has recorded no 'gone', only held, ratio" in warnings


def test_measured_figures_may_come_from_a_benchmark(book):
    book.write("bench/results/gpus.json", LAB)
    text, warnings = book.build("# T\n\n{measured}`gpus.ratio | ratio`.")
    assert (warnings, "1.44×." in text) == ("", True)


def test_a_page_follows_its_lab(book):
    book.write("labs/05_tensor.ipynb", notebook(output(LAB)))
    text = "# T\n\nHeld {measured}`05_tensor.held | MB`."
    assert "179.4 MB" in book.build(text)[0]
    book.write("labs/05_tensor.ipynb", notebook(output({**LAB, "figures": {"held": 2_000_000}})))
    assert "Held 2 MB." in book.build()[0]


def test_what_show_records_is_what_the_role_reads():
    data = show.measured(held=3)._repr_mimebundle_()
    made = {"output_type": "execute_result", "data": data}
    assert recorded(notebook(made))["figures"] == {"held": 3}
    with pytest.raises(ValueError, match="recorded nothing"):
        recorded(notebook())


def test_split():
    assert split("a.b | GB") == ("a.b", "GB")
    assert split('x["a"] \\| GB') == ('x["a"]', "GB")
    assert split("4 | 1 | count") == ("4 | 1", "count")


@pytest.mark.parametrize(("value", "form", "text"), [
    (16384, "KiB", "16 KiB"), (524287, "KiB", "512.0 KiB"), (141107412992, "GB", "141.1 GB"), (17.6e9, "GB", "17.6 GB"),
    (999.96e9, "GB", "1,000 GB"), (0, "GB", "0 GB"), (450e9, "GB/s", "450 GB/s"), (50e9, "Gbit/s", "400 Gbit/s"),
    (989e12, "TFLOP/s", "989 TFLOP/s"), (671026419200, "billion", "671.0 billion"), (1234567, "count", "1,234,567"),
    (219.7, "count", "220"), (450.0, "count", "450"), (3.64e-8, "s", "36.4 ns"), (29.4e-6, "us", "29.4 µs"),
    (9.0, "ratio", "9×"), (1.036, "ratio", "1.04×"), (7.94, "ratio", "7.9×"), (219.4, "ratio", "219×"),
    (0.853, "%", "85%"), (0.0126, "%", "1.3%"), (3.35, "number", "3.35"), (0.012345, "number", "0.0123"),
    (524288, "size", "524,288 B = 512 KiB = 524.29 kB"), ("bf16", "text", "bf16"), (5400, "hours", "1.5 hours"),
])
def test_formats(value, form, text):
    assert write(value, form).replace("\u00a0", " ") == text


def test_rounding_keeps_the_zeros_that_say_so():
    assert digits(17.602) == "17.60"
    assert digits(17.6) == "17.6"
    assert digits(12345.6) == "12,346"


def test_numbers_stay_on_their_line_and_words_may_break(book):
    html, warnings = book.build("# T\n\n{num}`2**14 | KiB`, {num}`'one two' | text`.", "html")
    assert warnings == ""
    assert re.findall(r'<span class="num">([^<]*)', html) == ["16 KiB"]
    assert "one two" in html
