"""One address, in one place, and the labs in line with it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from set_repository import badge, in_line, read, setup_cell, with_address

ROOT = Path(__file__).parents[2]
CONFIG = (ROOT / "_config.yml").read_text()
URL = "https://github.com/someone/their-book"


def notebook():
    title = {"cell_type": "markdown", "id": "a", "metadata": {}, "source": ["# Lab"]}
    setup = {"cell_type": "code", "id": "b", "metadata": {"tags": ["setup"]}, "source": ["old"], "outputs": [],
             "execution_count": 1}
    return {"cells": [title, setup], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


def test_the_address_is_set_and_taken_back():
    there = with_address(CONFIG, URL)
    assert read(there) == (URL, "main")
    assert with_address(there, read(CONFIG)[0]) == CONFIG
    assert len(set(there.splitlines()) ^ set(with_address(CONFIG, "").splitlines())) == 2, "one line differs"


@pytest.mark.parametrize("url", ["github.com/x/y", "http://github.com/x/y", 'https://x.org/"', "https://x.org/a b"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(SystemExit, match="no address"):
        with_address(CONFIG, url)


def test_a_lab_with_an_address_has_a_badge_that_pages_leave_out():
    made = in_line(notebook(), URL, "main", "labs/05_tensor.ipynb")
    title, button, setup = made["cells"]
    place = "github/someone/their-book/blob/main/labs/05_tensor.ipynb"
    assert button["source"][0].endswith(f"(https://colab.research.google.com/{place})")
    assert "remove-cell" in button["metadata"]["tags"]
    assert f"%pip install --quiet git+{URL}" in "".join(setup["source"])
    assert setup["id"] == "b" and title == notebook()["cells"][0]


def test_without_an_address_there_is_no_badge_and_nothing_to_install():
    made = in_line(in_line(notebook(), URL, "main", "labs/x.ipynb"), "", "main", "labs/x.ipynb")
    assert [cell["id"] for cell in made["cells"]] == ["a", "b"]
    assert "pip" not in "".join(made["cells"][1]["source"])


def test_only_github_has_a_badge():
    assert badge("https://gitlab.com/x/y", "main", "labs/x.ipynb") == ""


def test_bringing_in_line_twice_changes_nothing():
    once = in_line(notebook(), URL, "main", "labs/x.ipynb")
    assert in_line(once, URL, "main", "labs/x.ipynb") == once


def test_a_lab_needs_its_setup_cell():
    with pytest.raises(ValueError, match="no cell tagged 'setup'"):
        in_line({"cells": []}, URL, "main", "labs/x.ipynb")


@pytest.mark.parametrize("url", ["", URL])
def test_the_setup_cell_does_nothing_outside_colab(url):
    from IPython.core.inputtransformer2 import TransformerManager

    exec(TransformerManager().transform_cell(setup_cell(url)), {})


def test_the_command_rewrites_config_and_labs(tmp_path):
    (tmp_path / "labs").mkdir()
    (tmp_path / "_config.yml").write_text(CONFIG)
    (tmp_path / "labs" / "05_x.ipynb").write_text(json.dumps(notebook()))
    tool = [sys.executable, str(ROOT / "tools" / "set_repository.py")]
    subprocess.run([*tool, "--url", f"{URL}.git"], cwd=tmp_path, check=True, capture_output=True)
    assert read((tmp_path / "_config.yml").read_text())[0] == URL
    assert "badge" in (tmp_path / "labs" / "05_x.ipynb").read_text()
    said = subprocess.run(tool, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert said == f"the book's address is {URL}\n"
