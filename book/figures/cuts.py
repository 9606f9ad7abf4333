"""Draw the picture on the book's first page: weights too large for one card, and the same weights cut over four.

`python book/figures/cuts.py [FOLDER]` writes cuts.svg. Areas are to scale, and the numbers come from the library.
Text and outlines are of a grey that is legible on light and on dark, because the README shows the picture on both.
"""

import math
import sys
from pathlib import Path

from shardlab.cost import memory, traffic
from shardlab.show.palette import AXES
from shardlab.specs import Layout, find_model, units

CARD = 80 * 10**9
INK = "#858585"
HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} 372" font-family="sans-serif">
<style>path {{ stroke: {ink}; stroke-width: 3 }} marker path {{ stroke: none; fill: {ink} }}</style>
<marker id="head" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="5" markerHeight="5" orient="auto-start-reverse">
<path d="M0 0 10 5 0 10z"/></marker>"""
PIXELS = 15 / math.sqrt(10**9)  # side in pixels per root of a byte


def side(nbytes: float) -> float:
    """The side of a square whose area stands for so many bytes."""
    return PIXELS * math.sqrt(nbytes)


def square(x: float, y: float, nbytes: float, style: str) -> str:
    """A square for so many bytes, its lower left corner at (x, y)."""
    s = side(nbytes)
    return f'<rect x="{x:.1f}" y="{y - s:.1f}" width="{s:.1f}" height="{s:.1f}" rx="4" {style}/>'


def text(x: float, y: float, words: str, anchor: str = "middle", colour: str = INK, size: int = 23) -> str:
    """A line of text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-size="{size}">{words}</text>'


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """A line with a head at both ends."""
    return f'<path d="M{x1:.1f} {y1:.1f} {x2:.1f} {y2:.1f}" marker-start="url(#head)" marker-end="url(#head)"/>'


def whole(x: float, floor: float, weights: int) -> list[str]:
    """The model over the outline of the card that it does not fit on."""
    return [square(x, floor, weights, f'fill="{AXES["world"].colour}" fill-opacity="0.18"'),
            square(x, floor, CARD, f'fill="none" stroke="{INK}" stroke-width="3"'),
            text(x + side(weights) / 2, floor - side(weights) - 12, f"weights {units.decimal(weights, 4)}"),
            text(x + side(CARD) / 2, floor - side(CARD) / 2 + 8, f"card {units.decimal(CARD)}")]


def cut(x: float, floor: float, held: int) -> list[str]:
    """Four cards with a quarter each, and arrows between neighbours."""
    card, gap, out = side(CARD), 44.0, []
    colour = AXES["tp"].colour
    for i in range(4):
        left, low = x + (i % 2) * (card + gap), floor - (1 - i // 2) * (card + gap)
        out += [square(left, low, held, f'fill="{colour}"'),
                square(left, low, CARD, f'fill="none" stroke="{INK}" stroke-width="3"'),
                text(left + side(held) / 2, low - side(held) / 2 + 8, f"T{i}", colour="#FFFFFF"),
                text(left + card - 8, low - card + 27, units.decimal(held, 3), "end", size=20)]
    middle, near, far = card / 2, card + 7, card + gap - 7
    low, high = floor - middle, floor - card - gap - middle
    out += [arrow(x + near, y, x + far, y) for y in (low, high)]
    out += [arrow(x + middle + dx, floor - near, x + middle + dx, floor - far) for dx in (0, card + gap)]
    return out


def draw() -> str:
    """The whole picture, as SVG."""
    model, layout = find_model("llama-3.1-70b"), Layout(tp=4)
    weights, held = memory(model, Layout(), "bf16").weights, memory(model, layout, "bf16").weights
    sums = traffic(model, layout, 1, 1, "bf16", backward=False, head="logits").count("all_reduce")
    right = 20 + side(weights) + 70
    parts = [*whole(20, 318, weights), *cut(right, 318, held),
             text(20 + side(weights) / 2, 358, "does not fit"),
             text(right + side(CARD) + 22, 358, f"fits, with {sums} sums a token")]
    width = right + 2 * side(CARD) + 44 + 20
    return "\n".join([HEAD.format(width=width, ink=INK), *parts, "</svg>", ""])


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    (folder / "cuts.svg").write_text(draw(), encoding="utf-8")
