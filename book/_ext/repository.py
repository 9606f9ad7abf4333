"""Buttons that lead to the repository and to Colab, once its address is set (`make set-repository`). None before."""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx
from sphinx.config import Config

BUTTONS = {"use_repository_button": True, "use_issues_button": True}
COLAB = "https://colab.research.google.com"


def add_buttons(app: Sphinx, config: Config) -> None:
    """Switch the buttons on where `_config.yml` has an address; Colab's only for GitHub, which is all it can open."""
    url = config.html_theme_options.get("repository_url")
    if url:
        config.html_theme_options |= BUTTONS
        if "github.com" in url:
            config.html_theme_options["launch_buttons"] = {"colab_url": COLAB}


def setup(app: Sphinx) -> dict[str, Any]:
    """Before the theme reads its options (it does so at the default priority of 500)."""
    app.connect("config-inited", add_buttons, priority=100)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
