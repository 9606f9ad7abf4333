"""Figures that a lab measured, in a form that the page can take up, with the machine they were measured on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version

MIME = "application/vnd.shardlab.measured+json"


class Measured:
    """Named figures and the machine they come from; a notebook keeps them as output, and the book reads them there."""

    def __init__(self, figures: dict[str, float]):
        self.figures = figures
        self.machine = machine()

    def __repr__(self) -> str:
        width = max(map(len, self.figures), default=0)
        lines = [f"{name:<{width}}  {value:{',' if isinstance(value, int) else '.3g'}}"
                 for name, value in self.figures.items()]
        return "\n".join([*lines, f"on {self.machine}"])

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        return {MIME: {"figures": self.figures, "machine": self.machine}, "text/plain": repr(self)}


def measured(**figures: float) -> Measured:
    """Show figures of a run (bytes, seconds, ratios: plain numbers) as the output of a notebook's last line."""
    return Measured(figures)


def machine() -> str:
    """Hardware and versions in one line, without anything that names the machine itself."""
    return (f"{os.cpu_count()} cores ({platform.machine()}), {platform.system()}, Python {platform.python_version()}, "
            f"torch {version('torch')}")
