"""What a cut does to a layer: its matrices and its heads, drawn from the spec and the layout that cut them."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from ..specs import Layout, ModelSpec
from .palette import AXES, INK, PALE, ladder
from .picture import Picture

TOKENS, HIDDEN = 1.0, 1.7  # drawn sizes of the two dims that are not cut; the cut one is to scale with hidden
SEQ, GAP = 1.8, 1.15  # where the tokens are cut: their drawn size, and the room for what is sent


def column_then_row(spec: ModelSpec, layout: Layout) -> Picture:
    """The feed-forward block on `layout.tp` ranks: the first matrix cut by columns, the second by rows, then one sum.

    A slice has its rank's tint and number. Raises ValueError where the layout does not cut the spec.
    """
    layout.check(spec)
    p, ffn = layout.tp, HIDDEN * min(1.8, spec.ffn / spec.hidden)
    figure = Picture(figsize=(6.4, 5.4), layout="constrained")
    axes = figure.subplots()
    top = 5.0
    x = _matrix(axes, 0, top, HIDDEN, TOKENS, "X", f"tokens × {spec.hidden}")
    x = _sign(axes, x, top, "×")
    x = _matrix(axes, x, top, ffn, HIDDEN, "gate, up", f"{spec.hidden} × {spec.ffn}", p, by="columns")
    x = _sign(axes, x, top, "=")
    _matrix(axes, x, top, ffn, TOKENS, "Y", f"tokens × {spec.ffn}", p, by="columns")
    low = top - HIDDEN - 1.7
    x = _matrix(axes, 0, low, ffn, TOKENS, "Y", f"tokens × {spec.ffn}", p, by="columns")
    x = _sign(axes, x, low, "×")
    x = _matrix(axes, x, low, HIDDEN, ffn, "down", f"{spec.ffn} × {spec.hidden}", p, by="rows")
    x = _sign(axes, x, low, "=")
    parts = ladder(AXES["tp"].colour, p)
    step = 0.4
    for r in reversed(range(p)):
        axes.add_patch(Rectangle((x + step * r, low - TOKENS - step * r), HIDDEN, TOKENS, facecolor=parts[r],
                                 edgecolor="white", linewidth=1.5))
        axes.text(x + step * r + HIDDEN - 0.25, low - TOKENS - step * r + 0.18, f"T{r}", ha="center", va="center",
                  fontsize=13, color=_ink(r, p), weight="bold")
    axes.text(x, low + 0.12, f"{p} parts of a sum", fontsize=15, color=INK, va="bottom")
    axes.text(x, low - TOKENS - step * (p - 1) - 0.15, f"tokens × {spec.hidden}\neach: one all-reduce", fontsize=13,
              color=INK, va="top")
    return _finish(axes)


def through_a_block(spec: ModelSpec, layout: Layout) -> Picture:
    """What `layout.tp` ranks hold of the tokens from a norm through the feed-forward block to the next norm: above with
    tensor parallelism alone, below with sequence parallelism too, and what is sent in between.

    A slice has its rank's tint and number; what is pale is whole on every rank. Raises ValueError where the layout does
    not cut the spec, and on a single rank.
    """
    layout.check(spec)
    p = layout.tp
    if p == 1:
        raise ValueError("tp = 1 cuts nothing: draw a layout with tp of 2 or more")
    figure = Picture(figsize=(6.4, 5.6), layout="constrained")
    axes = figure.subplots()
    for top, title, stream, verbs in (
            (0.0, "tensor parallel", "", ("", "", "all-\nreduce")),
            (-SEQ - 1.9, "and sequence parallel", "rows", ("all-\ngather", "", "reduce-\nscatter"))):
        axes.text(0, top + 0.75, title, fontsize=16, color=INK, va="bottom", weight="bold")
        x = 0.0
        shapes = (("norm", 1.0, stream), ("X", 1.0, ""), ("Y", 1.5, "columns"), ("norm", 1.0, stream))
        for (name, width, by), weights, verb in zip(shapes, ("", "gate,\nup", "down", None), (*verbs, ""), strict=True):
            x = _matrix(axes, x, top, width, SEQ, name, "", p, by=by)
            if weights is not None:
                x = _step(axes, x, top, weights, verb)
    low = -2 * SEQ - 1.9
    for x, text in ((1.0 + GAP, "tokens ×\nhidden"), (2 * (1.0 + GAP), "tokens ×\nffn")):
        axes.text(x, low - 0.1, text, fontsize=14, color=INK, va="top")
    return _finish(axes)


def heads(spec: ModelSpec, layout: Layout) -> Picture:
    """Which heads each of `layout.tp` ranks holds: a square a query head, below them a square a KV head.

    A KV head that an earlier rank holds too is hatched: it is a copy. Raises ValueError where the heads don't divide.
    """
    layout.check(spec)
    p = layout.tp
    queries, keys = spec.heads // p, max(1, spec.kv_heads // p)
    columns = max(keys, math.isqrt(queries))
    lines = -(-queries // columns)
    figure = Picture(figsize=(6.4, 2.2), layout="constrained")
    axes = figure.subplots()
    for r in range(p):
        left = r * (columns + 0.8)
        axes.text(left + (columns - 0.1) / 2, 0.3, f"T{r}", ha="center", va="bottom", fontsize=15, color=INK,
                  weight="bold")
        for i in range(queries):
            corner = (left + i % columns, -1 - i // columns)
            axes.add_patch(Rectangle(corner, 0.9, 0.9, facecolor=AXES["tp"].colour))
        first = r * spec.kv_heads // p
        copy = r > 0 and spec.kv_heads < p and first == (r - 1) * spec.kv_heads // p
        for i in range(keys):
            axes.add_patch(Rectangle((left + i, -lines - 1.5), 0.9, 0.9, facecolor="white" if copy else INK,
                                     edgecolor=INK, hatch="////" if copy else None))
    axes.text(-0.4, -lines / 2, "query", ha="right", va="center", fontsize=15, color=INK)
    axes.text(-0.4, -lines - 1.05, "KV", ha="right", va="center", fontsize=15, color=INK)
    return _finish(axes)


def _matrix(axes: Axes, x: float, top: float, width: float, height: float, name: str, shape: str, p: int = 1,
            by: str = "") -> float:
    """Draw one matrix, cut into `p` slices by columns or rows; return where it ends."""
    tints = ladder(AXES["tp"].colour, p) if by else [PALE]
    for r, tint in enumerate(tints):
        w, h = (width / p, height) if by == "columns" else (width, height / p) if by else (width, height)
        corner = (x + r * w, top - h) if by == "columns" else (x, top - (r + 1) * h)
        axes.add_patch(Rectangle(corner, w, h, facecolor=tint, edgecolor="white" if by else INK, linewidth=1.5))
        if by:
            axes.text(corner[0] + w / 2, corner[1] + h / 2, f"T{r}", ha="center", va="center", fontsize=15,
                      color=_ink(r, p), weight="bold")
    axes.text(x, top + 0.12, name, fontsize=15, color=INK, va="bottom")
    axes.text(x, top - height - 0.12, shape, fontsize=13, color=INK, va="top")
    return x + width


def _step(axes: Axes, x: float, top: float, weights: str, verb: str) -> float:
    """An arrow to the next matrix: above it the weights that lead there, below the verb, where something is sent."""
    y = top - SEQ / 2
    axes.annotate("", (x + GAP - 0.12, y), (x + 0.12, y),
                  arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 2.4 if verb else 1.2,
                              "mutation_scale": 16, "shrinkA": 0, "shrinkB": 0})
    axes.text(x + GAP / 2, y + 0.1, weights, fontsize=14, color=INK, ha="center", va="bottom", style="italic")
    axes.text(x + GAP / 2, y - 0.12, verb, fontsize=14, color=INK, ha="center", va="top")
    return x + GAP


def _sign(axes: Axes, x: float, top: float, sign: str) -> float:
    axes.text(x + 0.35, top - TOKENS / 2, sign, fontsize=22, color=INK, ha="center", va="center")
    return x + 0.7


def _ink(rank: int, p: int) -> str:
    """Text on a rank's tint: white on the dark half, dark on the pale half."""
    return "white" if rank < p / 2 else INK


def _finish(axes: Axes) -> Picture:
    axes.set_aspect("equal")
    axes.set_axis_off()
    axes.autoscale_view()
    figure = axes.get_figure()
    assert isinstance(figure, Picture)
    return figure
