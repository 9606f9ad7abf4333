"""A matplotlib figure that a notebook shows as it is, in vectors, without pyplot and its state."""

from __future__ import annotations

import io

from matplotlib.figure import Figure


class Picture(Figure):
    """A Figure whose display in a notebook is its SVG; `savefig` and all else as in matplotlib."""

    def _repr_svg_(self) -> str:
        file = io.StringIO()
        self.savefig(file, format="svg", metadata={"Date": None})
        return file.getvalue()
