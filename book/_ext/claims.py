"""A claim that is often made, and what the library computes instead.

    ```{claim} A002-ring
    "Each of eight cards sends {said}`2 * one.payload | KiB`."

    It sends {right}`one.wire | KiB`: …
    ```

The argument is the claim's row in `tests/data/facts.yaml`, and its address on the page. Both roles write as {num} does,
so that the figure which is wrong is computed too, the wrong way; a test compares both with the row. Each stands once.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

from computed import Num
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class Said(Num):
    """{said}`expression | format`: the figure that the claim gives."""

    look: ClassVar[list[str]] = [*Num.look, "said"]


class Right(Num):
    """{right}`expression | format`: the figure that is computed."""

    look: ClassVar[list[str]] = [*Num.look, "right"]


class Claim(SphinxDirective):
    """{claim}: what is said, in the first paragraph, and why it is otherwise."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        text = "\n".join(self.content)
        for role in ("said", "right"):
            if (found := len(re.findall(rf"\{{{role}\}}`", text))) != 1:
                raise self.error(f"the claim {self.arguments[0]} needs one {{{role}}}, and has {found}")
        box = nodes.container(classes=["claim"], ids=[nodes.make_id(self.arguments[0])])
        self.state.nested_parse(self.content, self.content_offset, box)
        return [box]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive and its two roles."""
    app.add_directive("claim", Claim)
    app.add_role("said", Said())
    app.add_role("right", Right())
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
