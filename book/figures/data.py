"""Draw the figures of chapter 4: who holds what, what leaves when, and what of it is waited for.

`python book/figures/data.py [FOLDER]` writes data_step.svg, data_overlap.svg, data_stages.svg, data_bytes.svg and
data_gather.svg.
"""

import sys
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

from shardlab.cost import memory, serial_bytes
from shardlab.show.palette import AXES, HELD, INK, LINES, PALE, WORK, ladder
from shardlab.show.picture import Picture
from shardlab.specs import Layout, LinkSpec, find_card, find_link, find_model
from shardlab.specs.rows import FlatRow

SEVENTY, H100 = find_model("llama-3.1-70b"), find_card("h100")
RANKS = 4  # drawn
SEQUENCES = 8  # of a batch
BYTES = {"weights": 2, "gradients": 2, "states": 12}  # of a parameter, in bf16 with fp32 master weights and Adam
COLOURS = {"weights": HELD["weights"], "gradients": HELD["gradients"], "states": HELD["moments"]}
TOKENS = 8192  # on each card
CARDS = 8  # in a ring through one of these
LINKS = {"NVLink": find_link("nvlink4"), "InfiniBand": find_link("ib-ndr")}
LAYERS = 3  # drawn of a model, and its head


def step() -> Picture:
    """A step on four ranks: each its own sequences, the whole model, a gradient for all of it, and then the sum."""
    figure = Picture(figsize=(6.4, 4.7), layout="constrained")
    axes = figure.subplots()
    tints = ladder(AXES["dp"].colour, RANKS)
    each = SEQUENCES // Layout(dp=RANKS).dp
    for r in range(RANKS):
        x = 2.5 * r
        axes.text(x + 1, 0.25, f"{AXES['dp'].letter}{r}", fontsize=16, weight="bold", color=INK, ha="center")
        for i in range(each):
            axes.add_patch(Rectangle((x, -0.45 - 0.5 * i), 2, 0.36, facecolor=tints[r]))
        axes.text(x + 1, -1.5, f"{each} of {SEQUENCES}", fontsize=14, color=INK, ha="center", va="center")
        axes.add_patch(Rectangle((x, -3.6), 2, 1.6, facecolor=HELD["weights"]))
        axes.text(x + 1, -2.8, "all\nweights", fontsize=14, color="white", ha="center", va="center")
        axes.add_patch(Rectangle((x, -5.6), 2, 1.6, facecolor=PALE, edgecolor=tints[r], linewidth=4))
        axes.text(x + 1, -4.8, "its\ngradients", fontsize=14, color=INK, ha="center", va="center")
        axes.add_patch(arrow((x + 1, -5.75), (x + 1, -6.3)))
    wide = 2.5 * (RANKS - 1) + 2
    for r in range(RANKS):
        axes.add_patch(Rectangle((0, -6.9 - 0.2 * r), wide, 0.2, facecolor=tints[r]))
    axes.text(wide / 2, -7.6, "their sum, on every rank", fontsize=15, color=INK, ha="center", va="top")
    axes.set_xlim(-0.15, wide + 0.15)
    axes.set_ylim(-8.3, 0.8)
    axes.set_axis_off()
    return figure


def stages() -> Picture:
    """What each of four ranks holds of weights, gradients and optimizer states, without ZeRO and in its stages.

    An outline is all there is of a kind; the part of it that a rank holds is filled. Widths are bytes a parameter.
    """
    figure = Picture(figsize=(6.4, 5.6), layout="constrained")
    axes = figure.subplots()
    first = {"states": 1, "gradients": 2, "weights": 3}  # the stage from which on a kind is cut
    row, wide = FlatRow((RANKS,), RANKS), sum(BYTES.values())
    for stage in range(4):
        top = -1.75 * stage
        axes.text(-1, top - 0.5, f"ZeRO-{stage}" if stage else "plain", fontsize=15, color=INK, ha="right", va="center")
        for r in range(RANKS):
            x = (wide + 3) * r
            if not stage:
                axes.text(x + wide / 2, 0.15, f"{AXES['dp'].letter}{r}", fontsize=16, weight="bold", color=INK,
                          ha="center")
            held = 0.0
            for kind, nbytes in BYTES.items():
                part = row.share / row.numel if stage >= first[kind] else 1.0
                axes.add_patch(Rectangle((x, top - 1), nbytes, 1, facecolor="none", edgecolor=COLOURS[kind],
                                         linewidth=1))
                low = top - part * (r + 1) if part < 1 else top - 1
                axes.add_patch(Rectangle((x, low), nbytes, part, facecolor=COLOURS[kind], edgecolor=COLOURS[kind],
                                         linewidth=1))
                x, held = x + nbytes, held + part * nbytes
            axes.text(x - wide / 2, top - 1.08, f"{held:g}", fontsize=14, color=INK, ha="center", va="top")
    patches = [Rectangle((0, 0), 1, 1, facecolor=COLOURS[kind], label=f"{kind}, {nbytes}")
               for kind, nbytes in BYTES.items()]
    figure.legend(handles=patches, loc="outside lower left", ncols=3, frameon=False, fontsize=14, handlelength=1,
                  columnspacing=1.2, labelcolor=INK)
    axes.set_xlim(-16, (wide + 3) * RANKS - 2.5)
    axes.set_ylim(-6.8, 0.75)
    axes.set_axis_off()
    return figure


def units() -> list[int]:
    """Parameters of what is drawn of the model: some layers, and its head."""
    layer = sum(tensor.size for tensor in SEVENTY.layer_tensors())
    return [layer] * LAYERS + [SEVENTY.parameters["head"]]


def work(size: int, passes: int) -> float:
    """Seconds that a card computes at its peak: 2 FLOP a parameter and token forward (1 pass), 4 backward (2)."""
    return 2 * passes * size * TOKENS / H100.flop_rate("bf16")


def wire(op: str, size: int, link: LinkSpec) -> float:
    """Seconds that so many bf16 numbers take around a ring; to an all-gather a rank hands in its part of them."""
    nbytes = 2 * size / (CARDS if op == "all_gather" else 1)
    return serial_bytes(op, "ring", nbytes, CARDS) / link.per_direction


Bar = tuple[float, float, str]  # start, seconds, colour


def overlap() -> Picture:
    """The backward pass of some layers, and their gradients on the link: after it, while it runs, over a slow link."""
    cases = {"NVLink, sent after backward": backward(LINKS["NVLink"], False)}
    cases |= {f"{name}, sent while backward runs": backward(link, True) for name, link in LINKS.items()}
    return timelines(cases, {"backward": WORK["backward"], "all-reduce of gradients": HELD["gradients"]}, 4.7)


def backward(link: LinkSpec, while_running: bool) -> tuple[list[Bar], list[Bar]]:
    """The lanes of a card and of its link."""
    card: list[Bar] = []
    for size in reversed(units()):
        card.append((end(card), work(size, 2), WORK["backward"]))
    sent: list[Bar] = []
    for size, done in zip(reversed(units()), card, strict=True):
        ready = done[0] + done[1] if while_running else end(card)
        sent.append((max(end(sent), ready), wire("all_reduce", size, link), HELD["gradients"]))
    return card, sent


def gather() -> Picture:
    """ZeRO-3, forward and backward through some layers: a unit's weights come while the one before is computed."""
    kinds = {"forward": WORK["forward"], "backward": WORK["backward"], "all-gather": HELD["weights"],
             "reduce-scatter": HELD["gradients"]}
    return timelines({name: zero3(link) for name, link in LINKS.items()}, kinds, 3.9)


def zero3(link: LinkSpec) -> tuple[list[Bar], list[Bar]]:
    """The lanes of a card and of its link, which serves in the order in which it is asked.

    The head, last in forward and first in backward, is gathered once.
    """
    passes = [(size, 1, WORK["forward"]) for size in units()]
    passes += [(size, 2, WORK["backward"]) for size in reversed(units())]
    card: list[Bar] = []
    sent: list[Bar] = [(0.0, wire("all_gather", passes[0][0], link), HELD["weights"])]
    ready = end(sent)  # when the next unit's weights are here
    for i, (size, times, colour) in enumerate(passes):
        begin = max(ready, end(card))
        card.append((begin, work(size, times), colour))
        if i + 1 < len(passes) and i != LAYERS:
            sent.append((max(end(sent), begin), wire("all_gather", passes[i + 1][0], link), HELD["weights"]))
            ready = end(sent)
        if times == 2:
            sent.append((max(end(sent), end(card)), wire("reduce_scatter", size, link), HELD["gradients"]))
    return card, sent


def end(lane: list[Bar]) -> float:
    """When a lane's last bar is over."""
    return lane[-1][0] + lane[-1][1] if lane else 0.0


def timelines(cases: dict[str, tuple[list[Bar], list[Bar]]], kinds: dict[str, str], height: float) -> Picture:
    """Each case's two lanes, the card's and the link's, to one scale, and when both are done."""
    figure = Picture(figsize=(6.4, height), layout="constrained")
    axes = figure.subplots()
    longest = max(end(lane) for lanes in cases.values() for lane in lanes)
    for row, (name, lanes) in enumerate(cases.items()):
        y = 1.5 * row
        axes.text(0, y - 0.1, f"{name}: {1e3 * max(map(end, lanes)):.0f} ms", fontsize=15, color=INK, va="bottom")
        for i, (lane, bars) in enumerate(zip(("card", "link"), lanes, strict=True)):
            axes.text(-0.015 * longest, y + 0.45 * i + 0.2, lane, fontsize=14, color=INK, ha="right", va="center")
            draw_lane(axes, y + 0.45 * i, bars, longest)
    figure.legend(handles=[Rectangle((0, 0), 1, 1, facecolor=colour, label=kind) for kind, colour in kinds.items()],
                  loc="outside lower left", ncols=2, frameon=False, fontsize=14, handlelength=1, columnspacing=1.2,
                  labelcolor=INK)
    axes.set_xlim(-0.13 * longest, 1.02 * longest)
    axes.set_ylim(1.5 * len(cases) - 0.45, -0.55)
    axes.set_axis_off()
    return figure


def draw_lane(axes: Axes, y: float, bars: list[Bar], longest: float) -> None:
    """A lane: what is done, when, with a hair of space between."""
    for start, seconds, colour in bars:
        gap = min(0.004 * longest, 0.2 * seconds)
        axes.add_patch(Rectangle((start, y), seconds - gap, 0.4, facecolor=colour))


def held() -> Picture:
    """What a card holds of the 70B's states over the number of cards, without ZeRO and in its stages."""
    figure = Picture(figsize=(6.4, 4.8), layout="constrained")
    axes = figure.subplots()
    cards = [2**k for k in range(1, 11)]
    for stage, colour in enumerate((INK, *LINES[:3])):
        sizes = [memory(SEVENTY, Layout(dp=dp, zero=stage), "bf16", training=True, master="fp32").held / 1e9
                 for dp in cards]
        axes.plot(cards, sizes, color=colour, linewidth=3)
        axes.text(cards[-1] * 1.15, sizes[-1], f"ZeRO-{stage}" if stage else "plain", fontsize=15, color=colour,
                  va="center", weight="bold")
    axes.axhline(H100.memory / 1e9, color=INK, linewidth=2, linestyle="--")
    axes.text(128, 0.93 * H100.memory / 1e9, f"an H100: {H100.memory / 1e9:.1f} GB", fontsize=15, color=INK, va="top")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(cards[0], 5.5 * cards[-1])
    axes.set_xticks([2, 8, 64, 1024], ["2 cards", "8", "64", "1,024"])
    axes.set_yticks([1, 10, 100, 1000], ["1 GB", "10", "100", "1,000"])
    axes.tick_params(which="both", labelsize=14, labelcolor=INK, length=0)
    axes.set_facecolor(PALE)
    axes.spines[:].set_visible(False)
    return figure


def arrow(start: tuple[float, float], end: tuple[float, float]) -> FancyArrowPatch:
    """An arrow."""
    return FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=14, linewidth=1.8, shrinkA=0, shrinkB=0,
                           color=INK)


def draw(folder: Path) -> None:
    """Write all pictures into `folder`."""
    pictures = {"data_step": step(), "data_overlap": overlap(), "data_stages": stages(), "data_bytes": held(),
                "data_gather": gather()}
    for name, picture in pictures.items():
        picture.write_svg(folder / f"{name}.svg")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
