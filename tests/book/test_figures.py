"""Figures are what their scripts draw today."""

import re
import runpy
from pathlib import Path

import pytest

FIGURES = Path(__file__).parents[2] / "book" / "figures"


def rounded(picture):
    """The picture with its numbers to a tenth of a point: machines differ in the last digits."""
    return re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.1f}", picture.read_text(encoding="utf-8"))


@pytest.mark.parametrize("script", sorted(FIGURES.glob("*.py")), ids=lambda path: path.name)
def test_figures_are_up_to_date(script, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", [str(script), str(tmp_path)])
    runpy.run_path(str(script), run_name="__main__")
    drawn = sorted(tmp_path.iterdir())
    assert drawn
    for picture in drawn:
        assert rounded(picture) == rounded(FIGURES / picture.name), f"run python book/figures/{script.name}"


def test_every_figure_has_a_script():
    scripts = "".join(path.read_text() for path in FIGURES.glob("*.py"))
    for picture in FIGURES.glob("*.svg"):
        assert re.search(rf"\b{picture.stem}\b", scripts), f"no script draws {picture.name}"
