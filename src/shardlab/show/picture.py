"""A matplotlib figure that a notebook shows as it is, in vectors, without pyplot and its state."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TextIO

import matplotlib
from matplotlib.figure import Figure


class Picture(Figure):
    """A Figure whose display in a notebook is its SVG; `savefig` and all else as in matplotlib."""

    def _repr_svg_(self) -> str:
        file = io.StringIO()
        self.write_svg(file)
        return file.getvalue()

    def write_svg(self, file: TextIO | Path) -> None:
        """Write the drawing as SVG; the same drawing is the same text, without dates and random names."""
        with matplotlib.rc_context({"svg.hashsalt": "shardlab"}):
            self.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
