"""A bill on the page, as it shows itself in a notebook:

    ```{bill}
    ladder(llama, h100, Serve(context=8192, concurrency=32), cards=8)
    ```

The expression knows the names that the page's `{numbers}` gave. What can't be computed, or has no table to show, is a
warning with page and line, so `-W` fails the build.
"""

from __future__ import annotations

from typing import Any

from computed import HERE, names
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

LOGGER = logging.getLogger(__name__)


class ShownBill(SphinxDirective):
    """{bill}: the table of what the expression in it gives."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        expression = " ".join("\n".join(self.content).split())
        try:
            table = eval(compile(expression, HERE, "eval"), names(self.env))._repr_html_()
        except Exception as error:
            LOGGER.warning("bill: %s: %s: %s", expression, type(error).__name__, error, location=self.get_location())
            return []
        # in a box of its own, so that the page's next paragraph is not taken for one of the bill's notes
        return [nodes.raw("", f'<div class="shown">{table}</div>', format="html")]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("bill", ShownBill)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
