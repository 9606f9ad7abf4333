"""Draw the figures of chapter 3: what real ranks did, and what `cost` says of it.

`python book/figures/collectives.py [FOLDER]` writes collective_verbs.svg, ring_steps.svg, latency_bandwidth.svg,
links.svg and two_nodes.svg.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.patches import Circle, FancyArrowPatch, Rectangle

from shardlab import comm, show
from shardlab.cost import collective_seconds, crossover, messages
from shardlab.launch import launch
from shardlab.show.palette import INK, LINES, PALE, on
from shardlab.show.picture import Picture
from shardlab.specs import find_link, units

RANKS = 4
ALPHA = 1e-6  # seconds a message, assumed in the chapter
PAIRS = (("broadcast", "reduce"), ("all-gather", "reduce-scatter"), ("gather", "scatter"), ("all-to-all", "all-reduce"))
NAMES = {"nvlink5": "NVLink 5", "nvlink4": "NVLink 4", "nvlink4-h800": "NVLink 4, H800", "pcie5": "PCIe 5",
         "ib-ndr": "InfiniBand NDR", "ethernet-25": "25 GbE"}
NODE = 8  # ranks a node
OFF, CROSSES = "#777777", LINES[5]
LOW = -1.9  # where the second node stands


def verbs(group) -> dict[str, tuple[list[int], list[int]]]:
    """What a rank has before and after each verb, a number a piece: its bit r says that rank r's data are in it.

    Above those bits it has the piece's index, as often as ranks have been added up.
    """
    r, none = group.rank(), torch.empty(0, dtype=torch.long)
    whole = (1 << r) + (torch.arange(RANKS) << RANKS)
    own = whole[r : r + 1]
    at_root = whole if r == 0 else None
    added = comm.reduce(whole.clone(), 0)
    told = {"broadcast": (at_root, comm.broadcast(whole.clone(), 0)), "reduce": (whole, added if r == 0 else none),
            "all-gather": (own, comm.all_gather(own)), "reduce-scatter": (whole, comm.reduce_scatter(whole)),
            "gather": (own, comm.gather(own, 0)), "scatter": (at_root, comm.scatter(own.clone(), at_root)),
            "all-to-all": (whole, comm.all_to_all(whole)), "all-reduce": (whole, comm.all_reduce(whole.clone()))}
    return {verb: ([] if before is None else before.tolist(), after.tolist())
            for verb, (before, after) in told.items()}


def ring(group) -> comm.Ledger:
    """What a rank sent in an all-reduce around a ring."""
    with comm.use("ring"), comm.record() as ledger:
        comm.all_reduce(torch.ones(RANKS))
    return ledger


def collective_verbs() -> Picture:
    """Four ranks before and after each verb, as the verbs have left them."""
    ranks = launch(verbs, RANKS)
    figure = Picture(figsize=(6.4, 7.0), layout="constrained")
    for line, pair in zip(figure.subplots(len(PAIRS), 2), PAIRS, strict=True):
        for axes, verb in zip(line, pair, strict=True):
            axes.set_title(verb, fontsize=16, color=INK, loc="left")
            for moment in (0, 1):
                for r in range(RANKS):
                    pieces(axes, r + moment * (RANKS + 1.4), r, ranks[r][verb][moment])
            axes.add_patch(arrow((RANKS + 0.1, -RANKS / 2), (RANKS + 1.1, -RANKS / 2)))
            axes.set_xlim(-0.05, 2 * RANKS + 1.9)
            axes.set_ylim(-RANKS - 0.05, 0.05)
            axes.set_aspect("equal")
            axes.set_axis_off()
    return figure


def pieces(axes: Axes, x: float, rank: int, held: list[int]) -> None:
    """A rank's column: a single piece stands where that rank's piece is; a sum has a stripe for each rank in it.

    A piece of one rank's says whose and which: b2.
    """
    axes.add_patch(Rectangle((x, -RANKS), 0.86, RANKS, facecolor=PALE))
    for i, bits in enumerate(held, start=rank if len(held) == 1 else 0):
        whose = [r for r in range(RANKS) if bits >> r & 1]
        for n, r in enumerate(whose):
            axes.add_patch(Rectangle((x + 0.86 * n / len(whose), -i - 0.96), 0.86 / len(whose), 0.92,
                                     facecolor=LINES[r]))
        if len(whose) == 1:
            axes.text(x + 0.43, -i - 0.52, f"{'abcd'[whose[0]]}{bits >> RANKS}", fontsize=13, weight="bold",
                      color=on(LINES[whose[0]]), ha="center", va="center_baseline")


def ring_steps() -> Picture:
    """The steps of a ring all-reduce, as the ledgers of four ranks have them."""
    return show.steps(comm.Ledger.merge(launch(ring, RANKS)).to_dicts())


def latency_bandwidth() -> Picture:
    """An all-reduce on eight cards over size, by four algorithms."""
    link = replace(find_link("nvlink4"), alpha=ALPHA)
    curves = {name: [(2.0**k, collective_seconds("all_reduce", name, 2.0**k, 8, link)) for k in range(9, 31)]
              for name in ("ring", "doubling", "halving", "tree")}
    meet = crossover("all_reduce", "ring", "doubling", 8, link)
    assert meet is not None  # the ring has more hops and fewer bytes
    return show.latency(curves, marks={f"crossover: {units.decimal(meet, 2)}": meet})


def links() -> Picture:
    """What one card can send over each, in one direction; and how much more NVLink's is than the network's."""
    figure = Picture(figsize=(6.4, 4.6), layout="constrained")
    axes = figure.subplots()
    rates = {name: find_link(name).per_direction / 1e9 for name in NAMES}
    for i, (name, rate) in enumerate(rates.items()):
        axes.text(1, i - 0.26, f"{NAMES[name]}: {rate:.4g} GB/s", fontsize=15, color=INK, va="bottom")
        axes.barh(i, rate - 1, left=1, height=0.46, color=LINES[0])
    fast, slow, top, row = rates["nvlink4"], rates["ib-ndr"], list(rates).index("nvlink4"), list(rates).index("ib-ndr")
    headline = (find_link("nvlink4").headline or 0) / 1e9  # both directions
    for y, rate, colour, words in ((row, fast, INK, f"× {fast / slow:g}"),
                                   (row + 0.75, headline, OFF, f"not × {headline / slow:g}")):
        axes.add_patch(arrow((slow, y), (rate, y), colour=colour))
        axes.text((slow * rate) ** 0.5, y - 0.08, words, fontsize=15, color=colour, ha="center", va="bottom")
        axes.plot([rate, rate], [top, y], color=colour, linewidth=1.6, linestyle=":")
    axes.add_patch(Rectangle((fast, top - 0.23), headline - fast, 0.46, facecolor="none", edgecolor=OFF, linewidth=1.6,
                             linestyle="--"))
    axes.set_xscale("log")
    axes.set_xlim(1, 1.1 * max(rates.values()))
    axes.set_ylim(len(rates) - 0.6, -0.75)
    axes.set_xticks([1, 10, 100, 1000], ["1 GB/s", "10", "100", ""])
    axes.tick_params(axis="x", which="both", labelsize=14, labelcolor=INK, length=0)
    axes.set_yticks([])
    axes.set_facecolor(PALE)
    axes.spines[:].set_visible(False)
    return figure


def two_nodes() -> Picture:
    """A flat ring over two nodes and the two-level all-reduce: who sends to whom, and how much of it crosses."""
    figure = Picture(figsize=(6.4, 6.2), layout="constrained")
    snake = {r: (r, 0.0) if r < NODE else (2 * NODE - 1 - r, LOW) for r in range(2 * NODE)}
    places = {r: (r % NODE, LOW * (r // NODE)) for r in range(2 * NODE)}
    for axes, name, algorithm, where in zip(figure.subplots(2, 1), ("flat ring", "two levels"), ("ring", "two_level"),
                                            (snake, places), strict=True):
        sent = [m for one in messages("all_reduce", algorithm, 2 * NODE, 1, 2 * NODE, per_node=NODE) for m in one]
        crossing = sum(m.nbytes for m in sent if m.src < NODE <= m.dst) / (2 * NODE)
        axes.set_title(f"{name}: {crossing:.4g} n out of each node", fontsize=16, color=INK, loc="left")
        for y in (0.0, LOW):
            axes.add_patch(Rectangle((-0.5, y - 0.65), NODE, 1.3, facecolor=PALE, edgecolor=INK, linewidth=1.2))
        pairs = {(m.src, m.dst) for m in sent}
        for src, dst in sorted(pairs):
            if (dst, src) not in pairs or src < dst:
                hop(axes, where[src], where[dst], both=(dst, src) in pairs)
        for r, (x, y) in where.items():
            axes.add_patch(Circle((x, y), 0.24, facecolor="white", edgecolor=INK, linewidth=1.4, zorder=4))
            axes.text(x, y, f"{r}", fontsize=14, color=INK, ha="center", va="center_baseline", zorder=5)
        axes.set_xlim(-0.55, NODE - 0.45)
        axes.set_ylim(LOW - 0.7, 0.7)
        axes.set_aspect("equal")
        axes.set_axis_off()
    return figure


def hop(axes: Axes, start: tuple[float, float], end: tuple[float, float], both: bool) -> None:
    """An arrow from rank to rank: heavy between the nodes, an arc where other ranks are between."""
    (x, y), (to, down) = start, end
    if y != down:
        step = 0.26 if down > y else -0.26
        axes.add_patch(arrow((x, y + step), (to, down - step), "<|-|>" if both else "-|>", colour=CROSSES, width=3.5))
    elif abs(to - x) == 1:
        step = 0.26 * (to - x)
        axes.add_patch(arrow((x + step, y), (to - step, y)))
    else:
        side = 0.26 if y > LOW else -0.26
        axes.add_patch(arrow((x, y + side), (to, y + side), bend=side / 4))


def arrow(start: tuple[float, float], end: tuple[float, float], style: str = "-|>", bend: float = 0.0,
          colour: str = INK, width: float = 1.8) -> FancyArrowPatch:
    """An arrow, or a bow where `bend` is not 0."""
    return FancyArrowPatch(start, end, arrowstyle=style, connectionstyle=f"arc3,rad={bend}", mutation_scale=12,
                           linewidth=width, shrinkA=0, shrinkB=0, color=colour, zorder=3)


def draw(folder: Path) -> None:
    """Write all pictures into `folder`."""
    pictures = {"collective_verbs": collective_verbs(), "ring_steps": ring_steps(),
                "latency_bandwidth": latency_bandwidth(), "links": links(), "two_nodes": two_nodes()}
    for name, picture in pictures.items():
        picture.write_svg(folder / f"{name}.svg")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
