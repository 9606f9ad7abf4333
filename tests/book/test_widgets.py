"""Widgets and formulas work in a built page without a kernel and without the network, from the vendored scripts."""

from io import StringIO
from pathlib import Path

import ipywidgets
import nbformat
import pytest
import yaml
from ipywidgets.embed import embed_data
from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace, patch_docutils

ROOT = Path(__file__).parents[2]
TAKEN_OVER = ("mathjax_path", "nb_ipywidgets_js", "html_js_files")
VIEW = "application/vnd.jupyter.widget-view+json"


def notebook():
    """A formula, a slider, and a label that follows it through jslink."""
    slider, label = ipywidgets.IntSlider(value=3, description="ranks \\(p\\)"), ipywidgets.IntText(value=3)
    data = embed_data(views=[ipywidgets.VBox([slider, label]), ipywidgets.jslink((slider, "value"), (label, "value"))])
    view = nbformat.v4.new_output("display_data", {VIEW: data["view_specs"][0], "text/plain": "VBox()"})
    cells = [nbformat.v4.new_markdown_cell("# Page\n\n$$ t = 2(p-1)\\,\\alpha $$"),
             nbformat.v4.new_code_cell("show()", outputs=[view], execution_count=1)]
    state = {"application/vnd.jupyter.widget-state+json": data["manager_state"]}
    return nbformat.v4.new_notebook(cells=cells, metadata={"widgets": state})


@pytest.fixture
def page(tmp_path, serve_folder, browser):
    """The notebook as a page, built with the book's own settings and opened."""
    ours = yaml.safe_load((ROOT / "_config.yml").read_text())["sphinx"]["config"]
    settings = {name: ours[name] for name in TAKEN_OVER} | {
        "html_static_path": [str(ROOT / path) for path in ours["html_static_path"]],
        "html_favicon": str(ROOT / "book" / "web" / "icon.svg"), "extensions": ["myst_nb"], "root_doc": "page",
        "myst_enable_extensions": ["dollarmath"], "nb_execution_mode": "off"}
    nbformat.write(notebook(), tmp_path / "page.ipynb")
    with patch_docutils(), docutils_namespace():
        Sphinx(tmp_path, None, tmp_path / "site", tmp_path / "trees", "html", settings, status=StringIO()).build()
    home = serve_folder(tmp_path / "site")
    return browser.open(f"{home}/page.html"), home


@pytest.mark.filterwarnings("ignore")
def test_widgets_and_formulas_work_offline(page):
    page, home = page
    assert page.run("document.querySelectorAll('mjx-container').length") == 2, "in the text and in a label"
    assert page.run("document.querySelectorAll('.widget-slider').length") == 1
    assert page.errors == []
    assert [url for url in page.requests if not url.startswith((home, "data:", "blob:"))] == []
    page.run("document.querySelector('.widget-slider .noUi-handle').focus()")
    for kind in ("keyDown", "keyUp"):
        page.call("Input.dispatchKeyEvent", type=kind, key="ArrowUp", code="ArrowUp", windowsVirtualKeyCode=38)
    assert page.run("document.querySelector('.widget-text input').value") == "4", "jslink follows the slider"
