"""The book's colours: one for each axis, for each kind of work, for each kind of thing that a card holds.

Told apart by colour-blind readers too. Axes take the colours of Okabe and Ito (jfly.uni-koeln.de/color), work and what
is held the muted ones of Paul Tol.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """How an axis is drawn: its colour, and the letter that stands on it for those who don't see the colour."""

    colour: str
    letter: str


AXES = {
    "dp": Axis("#0072B2", "D"),
    "tp": Axis("#D55E00", "T"),
    "pp": Axis("#009E73", "P"),
    "ep": Axis("#CC79A7", "E"),
    "cp": Axis("#56B4E9", "S"),
    "zero": Axis("#E69F00", "Z"),
    "world": Axis("#777777", "W"),
}
WORK = {"forward": "#88CCEE", "backward": "#332288", "weight gradient": "#DDCC77", "idle": "#DDDDDD"}
HELD = {"weights": "#117733", "gradients": "#999933", "master weights": "#44AA99", "moments": "#CC6677",
        "activations": "#AA4499", "logits": "#882255", "KV cache": "#332288", "buffers": "#BBBBBB"}
LINES = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377")  # Tol's bright ones: what is none of these
INK, PALE = "#333333", "#F3F3F3"


def ladder(colour: str, steps: int) -> list[str]:
    """`steps` tints of a colour, from itself to pale: the ranks along one axis."""
    r, g, b = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    out = []
    for i in range(steps):
        t = 0.75 * i / max(1, steps - 1)
        out.append("#" + "".join(f"{round(c + (255 - c) * t):02X}" for c in (r, g, b)))
    return out


def on(colour: str) -> str:
    """What is legible on a colour: white or ink, whichever has more contrast (WCAG 2, relative luminance)."""
    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05

    return "white" if light(colour) / light(INK) < light("#FFFFFF") / light(colour) else INK
