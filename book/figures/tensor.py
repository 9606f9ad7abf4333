"""Draw the figures of chapter 5 from the library's own objects.

`python book/figures/tensor.py [FOLDER]` writes column_then_row.svg and heads.svg.
"""

import sys
from pathlib import Path

from shardlab import show
from shardlab.specs import Layout, find_model


def draw(folder: Path) -> None:
    """Write both pictures into `folder`."""
    llama = find_model("llama-3.1-70b")
    pictures = {"column_then_row": show.column_then_row(llama, Layout(tp=2)), "heads": show.heads(llama, Layout(tp=8))}
    for name, picture in pictures.items():
        picture.write_svg(folder / f"{name}.svg")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
