"""Draw the figures of chapter 5 from the library's own objects.

`python book/figures/tensor.py [FOLDER]` writes column_then_row.svg, heads.svg, through_a_block.svg and kept.svg.
"""

import sys
from pathlib import Path

from matplotlib.patches import Rectangle

from shardlab import show
from shardlab.cost import activations
from shardlab.show.palette import AXES, INK, PALE
from shardlab.show.picture import Picture
from shardlab.specs import Layout, find_model

LLAMA, TP, TOKENS = find_model("llama-3.1-70b"), 8, 8192


def terms(layout: Layout) -> dict[str, int]:
    """Bytes that one layer keeps on a rank, by what they are of."""
    kept = activations(LLAMA, layout, batch=1, seq=TOKENS, dtype="bf16", device="cuda")
    return {term.what: term.nbytes for term in kept.kinds[-1][1]}


def kept() -> Picture:
    """What a layer keeps on each rank, without and with sequence parallelism: what is cut, and what is whole."""
    whole = terms(Layout())
    bars = {"tensor parallel": terms(Layout(tp=TP)),
            "and sequence parallel: keep": terms(Layout(tp=TP, sp="keep")),
            "and sequence parallel: again": terms(Layout(tp=TP, sp="again"))}
    figure = Picture(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    longest = max(sum(bar.values()) for bar in bars.values()) / 1e6
    for i, (name, bar) in enumerate(bars.items()):
        axes.text(0, i - 0.34, name, fontsize=15, color=INK, va="bottom")
        same = sum(nbytes for what, nbytes in bar.items() if nbytes == whole[what]) / 1e6
        cut = sum(bar.values()) / 1e6 - same
        axes.barh(i, cut, height=0.54, color=AXES["tp"].colour, edgecolor=INK, linewidth=1.2)
        axes.barh(i, same, left=cut, height=0.54, color=PALE, edgecolor=INK, linewidth=1.2)
        for left, part, ink in ((0, cut, "white"), (cut, same, INK)):
            if part > 0.08 * longest:
                axes.text(left + part / 2, i, f"{part:,.0f}", fontsize=15, weight="bold", color=ink, ha="center",
                          va="center")
        axes.text(cut + same + 0.015 * longest, i, f"{cut + same:,.0f} MB", fontsize=15, color=INK, va="center")
    figure.legend(handles=[Rectangle((0, 0), 1, 1, facecolor=AXES["tp"].colour, label="cut", edgecolor=INK),
                           Rectangle((0, 0), 1, 1, facecolor=PALE, label=f"whole on all {TP}", edgecolor=INK)],
                  loc="outside lower left", ncols=2, frameon=False, fontsize=14, handlelength=1, labelcolor=INK)
    axes.set_xlim(0, 1.2 * longest)
    axes.set_ylim(len(bars) - 0.5, -0.75)
    axes.set_axis_off()
    return figure


def draw(folder: Path) -> None:
    """Write all pictures into `folder`."""
    pictures = {"column_then_row": show.column_then_row(LLAMA, Layout(tp=2)), "heads": show.heads(LLAMA, Layout(tp=TP)),
                "through_a_block": show.through_a_block(LLAMA, Layout(tp=2)), "kept": kept()}
    for name, picture in pictures.items():
        picture.write_svg(folder / f"{name}.svg")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
