"""What keeps a built page to itself: no script of another site, and no torch behind the numbers.

Some extensions that Jupyter Book always loads put another site's address into each page, for features that this book
doesn't use (thebe's live code). They are taken out as pages are written.
"""

from __future__ import annotations

import sys
from typing import Any

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError


def drop_thebe(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Leave out the scripts of sphinx-thebe."""
    context["script_files"] = [script for script in context["script_files"]
                               if "thebe" not in str(script.filename) + str(script.attributes.get("body", ""))]


def no_torch(app: Sphinx, error: Exception | None) -> None:
    """Fail a build that has imported torch: it has to start in seconds, and run where torch isn't installed."""
    if sys.modules.get("torch") and error is None:
        raise ExtensionError("building the book imported torch: a page may use shardlab.specs and shardlab.cost only")


def setup(app: Sphinx) -> dict[str, Any]:
    """After the others have added their scripts."""
    app.connect("html-page-context", drop_thebe, priority=900)
    app.connect("build-finished", no_torch)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
