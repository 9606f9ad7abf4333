"""Numbers in the prose, computed by the library while the page is built.

A page names what it needs in a block that is not shown, then writes numbers as roles:

    ```{numbers}
    llama = find_model("llama-3.1-70b")
    held = memory(llama, Layout(tp=8), "bf16")
    ```
    Each card holds {num}`held.weights | GB`, measured were {measured}`05_tensor.held | MB` on {machine}`05_tensor`.

Both know everything that `shardlab.specs` and `shardlab.cost` export, `math`, and what stands above them on the page.
`formats.py` lists the formats. {measured} reads the committed outputs of `labs/05_tensor.ipynb`, where the lab left its
figures with `show.measured(held=…)`, or else `bench/results/05_tensor.json`, for what a benchmark measured. In a
table the bar is written `\\|`. What can't be computed is a warning with page and line, so `-W` fails the build.
"""

from __future__ import annotations

import json
import math
import traceback
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from formats import write
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective, SphinxRole

import shardlab.cost
import shardlab.schedule
import shardlab.specs

LOGGER = logging.getLogger(__name__)
HERE = "<numbers>"
MIME = "application/vnd.shardlab.measured+json"  # as shardlab.show.measured writes it


def fresh() -> dict[str, Any]:
    """The names that every page starts with."""
    rooms = (shardlab.specs, shardlab.cost)
    return {"math": math} | {name: getattr(room, name) for room in rooms for name in room.__all__}


def names(env: BuildEnvironment) -> dict[str, Any]:
    """The names of the page that is being read. The page is read again when the library behind them changes."""
    if "numbers" not in env.temp_data:
        env.temp_data["numbers"] = fresh()
        for room in (shardlab.specs, shardlab.cost, shardlab.schedule):
            for path in Path(room.__file__).parent.rglob("*"):
                if path.suffix in (".py", ".toml", ".json"):
                    env.note_dependency(str(path))
    return env.temp_data["numbers"]


def split(text: str) -> tuple[str, str]:
    """("held.weights", "GB") of "held.weights | GB". ValueError where there is no format."""
    expression, bar, form = text.replace("\\|", "|").rpartition("|")
    if not bar:
        raise ValueError("no format: write `expression | GB`, or `| count`, `| ratio`, `| text`")
    return expression.strip(), form.strip()


def measured(env: BuildEnvironment, name: str) -> dict[str, Any]:
    """What the lab or the benchmark `name` recorded: `figures` (name → number) and the `machine`, in words."""
    lab, other = Path(env.srcdir, "labs", f"{name}.ipynb"), Path(env.srcdir, "bench", "results", f"{name}.json")
    path = lab if lab.exists() else other
    env.note_dependency(str(path))
    if not path.exists():
        raise ValueError(f"nothing was measured under {name!r}: there is no labs/{name}.ipynb, no {other.name}")
    content = json.loads(path.read_text(encoding="utf-8"))
    return recorded(content) if path == lab else content


def recorded(notebook: dict[str, Any]) -> dict[str, Any]:
    """The figures in a notebook's outputs, those of several cells together. ValueError where it has none."""
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    found = [output["data"][MIME] for output in outputs if MIME in output.get("data", {})]
    if not found:
        raise ValueError("the lab has recorded nothing: end a cell with `show.measured(name=figure)`, run `make labs`")
    return {"figures": {k: v for one in found for k, v in one["figures"].items()}, "machine": found[-1]["machine"]}


class Numbers(SphinxDirective):
    """{numbers}: Python statements whose names the page's roles may use. Shows nothing."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        try:
            exec(compile("\n".join(self.content), HERE, "exec"), names(self.env))
        except Exception as error:
            lines = [frame.lineno or 0 for frame in traceback.extract_tb(error.__traceback__) if frame.filename == HERE]
            line = error.lineno or 0 if isinstance(error, SyntaxError) else lines[0] if lines else 0
            LOGGER.warning("numbers: %s: %s", type(error).__name__, error,
                           location=(self.env.docname, self.lineno + line))
        return []


class ComputedRole(SphinxRole):
    """A role whose text is computed; a failure is a warning, and shows the source in the page."""

    look: ClassVar[list[str]] = ["num"]

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        try:
            return [nodes.inline(self.rawtext, self.compute(), classes=self.classes())], []
        except Exception as error:
            LOGGER.warning("%s: %s: %s: %s", self.name, self.text, type(error).__name__, error,
                           location=self.get_location())
            return [nodes.literal(self.rawtext, self.text)], []

    def compute(self) -> str:
        raise NotImplementedError

    def classes(self) -> list[str]:
        """What it looks like."""
        return self.look


class Num(ComputedRole):
    """{num}`expression | format`"""

    def compute(self) -> str:
        expression, form = split(self.text)
        return write(eval(compile(expression, HERE, "eval"), names(self.env)), form)

    def classes(self) -> list[str]:
        return [] if split(self.text)[1] == "text" else self.look  # words may break over lines


class Measured(ComputedRole):
    """{measured}`name.key | format`"""

    def compute(self) -> str:
        place, form = split(self.text)
        name, _, key = place.partition(".")
        figures = measured(self.env, name)["figures"]
        if key not in figures:
            raise ValueError(f"{name} has recorded no {key!r}, only {', '.join(figures)}")
        return write(figures[key], form)


class Machine(ComputedRole):
    """{machine}`name`: the hardware and the versions that the figures of `name` were measured with."""

    look: ClassVar[list[str]] = []  # words, which may break over lines

    def compute(self) -> str:
        return str(measured(self.env, self.text)["machine"])


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the block and the three roles."""
    app.add_directive("numbers", Numbers)
    app.add_role("num", Num())
    app.add_role("measured", Measured())
    app.add_role("machine", Machine())
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
