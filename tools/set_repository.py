"""Set where the book is published: `make set-repository URL=https://github.com/you/yours`; URL= takes it back.

The address has one place, `repository: url:` in _config.yml. What follows from it is in the labs and is written here:
the setup cell, which installs the library in Colab, and a badge that opens the lab there. (A page shows a button in
its place, because the badge's picture would be asked of Colab. On other sites than GitHub there is neither: Colab can
open only that.) Without --url the labs are brought in line with the address that is set.
"""

import argparse
import json
import re
from pathlib import Path

CONFIG = Path("_config.yml")
LINE = re.compile(r'(?m)^(repository:\n  url:) *"?([^"\n#]*?)"?$')
GITHUB = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+")

SETUP = """\
# In Colab this installs the library and leaves Colab's own PyTorch alone. Elsewhere it does nothing.
import sys

if "google.colab" in sys.modules:
    {install}"""
INSTALL = "%pip install --quiet git+{url}"
NO_ADDRESS = 'raise RuntimeError("this copy has no public address to install from: see make set-repository")'
BADGE = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({link})"
LINK = "https://colab.research.google.com/github/{name}/blob/{branch}/{lab}"


def read(config: str) -> tuple[str, str]:
    """The address and the branch that _config.yml has."""
    address, branch = LINE.search(config), re.search(r"(?m)^  branch: *(\S+)", config)
    if not address or not branch:
        raise SystemExit(f"{CONFIG} has lost its `repository:` with `url:` and `branch:`")
    return address[2], branch[1]


def with_address(config: str, url: str) -> str:
    """_config.yml's text with another address. SystemExit on what is no https address."""
    if url and not re.fullmatch(r"https://[\w.-]+/[\w./-]+", url):
        raise SystemExit(f"{url!r} is no address of a repository: give https://github.com/you/yours")
    return LINE.sub(lambda match: f'{match[1]} "{url}"', config)


def setup_cell(url: str) -> str:
    """The source of a lab's setup cell."""
    return SETUP.format(install=INSTALL.format(url=url) if url else NO_ADDRESS)


def badge(url: str, branch: str, lab: str) -> str:
    """The badge that opens `lab` in Colab, as Markdown; nothing if it is not on GitHub."""
    if not GITHUB.fullmatch(url):
        return ""
    return BADGE.format(link=LINK.format(name=url.removeprefix("https://github.com/"), branch=branch, lab=lab))


def in_line(notebook: dict, url: str, branch: str, lab: str) -> dict:
    """The notebook with its badge and its setup cell as `url` has them. ValueError where it has no setup cell."""
    cells = [cell for cell in notebook["cells"] if "badge" not in tags(cell)]
    at = next((i for i, cell in enumerate(cells) if "setup" in tags(cell)), None)
    if at is None:
        raise ValueError(f"{lab} has no cell tagged 'setup'")
    cells[at] = {**cells[at], "source": setup_cell(url).splitlines(keepends=True)}
    if badge(url, branch, lab):
        cells.insert(at, {"cell_type": "markdown", "id": "badge", "metadata": {"tags": ["badge", "remove-cell"]},
                          "source": [badge(url, branch, lab)]})
    return {**notebook, "cells": cells}


def tags(cell: dict) -> list[str]:
    """A cell's tags."""
    return cell["metadata"].get("tags", [])


def main() -> None:
    """Set the address if one is given, then bring every lab in line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url")
    new = parser.parse_args().url
    if new is not None:
        CONFIG.write_text(with_address(CONFIG.read_text(), new.rstrip("/").removesuffix(".git")))
    url, branch = read(CONFIG.read_text())
    for path in sorted(Path("labs").glob("*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        changed = in_line(notebook, url, branch, path.as_posix())
        if changed != notebook:
            path.write_text(json.dumps(changed, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            print(f"rewrote {path}")
    print(f"the book's address is {url}" if url else "the book has no address: no badges, no repository button")


if __name__ == "__main__":
    main()
