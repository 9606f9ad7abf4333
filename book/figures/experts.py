"""Draw the figures of chapter 7: tokens on their way to experts, and who has how many.

`python book/figures/experts.py [FOLDER]` writes experts_cut.svg, experts_nodes.svg, experts_full.svg, experts_load.svg
and experts_groups.svg.
"""

import sys
from pathlib import Path
from random import Random

import torch
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

from shardlab.model import Routing, Rules
from shardlab.model.router import Router
from shardlab.show.palette import AXES, INK, PALE, ladder, on
from shardlab.show.picture import Picture
from shardlab.specs import Experts, Layout, find_model
from shardlab.specs.placement import place, plain

V3 = find_model("deepseek-v3").experts
assert V3 is not None
EP, LETTER = AXES["ep"].colour, AXES["ep"].letter
RANKS, TOKENS = 4, 3  # drawn: so many tokens on each rank
SMALL = Experts(routed=8, active=2, ffn=1)
LOADS = (46, 76, 68, 101, 5, 86, 75, 55)  # of lab 7's first layer; tests/book/test_cutting_experts.py
CAPACITIES = (1.0, 1.25)
CHOSEN = (3, 26, 40, 71, 100, 138, 170, 181)  # experts of V3 that a token may choose freely, on six of eight servers


def routed() -> Routing:
    """Where a router as it was made sends the tokens that are drawn."""
    torch.manual_seed(3)
    routing = Routing(router := Router(16, SMALL, Rules()), torch.ones(RANKS * TOKENS, dtype=torch.bool))
    weights, _ = router(torch.randn(RANKS * TOKENS, 16), routing)
    router.plan(routing, weights)
    return routing


def cut() -> Picture:
    """Tokens of four ranks, the experts of four ranks and what was sent to them, and the tokens again."""
    routing = routed()
    assert routing.slots is not None and routing.experts is not None
    figure = Picture(figsize=(6.4, 5.6), layout="constrained")
    axes = figure.subplots()
    tints, wide, side, gap = ladder(EP, RANKS), 3.0, 0.62, 0.9
    each, most = SMALL.routed // RANKS, max(routing.counts)
    floor, low, step = -1.9 - side * most, -1.9 - side * most - 3.6, wide + gap
    for r in range(RANKS):
        x = r * step
        axes.text(x + wide / 2, 0.95, f"{LETTER}{r}", fontsize=16, weight="bold", color=INK, ha="center")
        for y in (0.1, low):
            for i in range(TOKENS):
                square(axes, x + (wide - TOKENS * side) / 2 + i * side, y, side, tints[r])
        for i in range(each):
            number = r * each + i
            left = x + i * wide / each
            axes.add_patch(Rectangle((left + 0.06, floor - 1.15), wide / each - 0.12, 1.05, facecolor=PALE,
                                     edgecolor=INK, linewidth=1.2))
            axes.text(left + wide / each / 2, floor - 0.62, f"{number}", fontsize=15, color=INK, ha="center",
                      va="center")
            first = sum(routing.counts[:number])
            for j, slot in enumerate(routing.slots[first : first + routing.counts[number]].tolist()):
                home = slot // SMALL.active // TOKENS
                square(axes, left + (wide / each - side) / 2, floor + j * side, side, tints[home])
    tokens = torch.arange(RANKS * TOKENS)
    for token, chosen in zip(tokens.tolist(), routing.experts.tolist(), strict=True):
        at = token // TOKENS * step + (wide - TOKENS * side) / 2 + (token % TOKENS + 0.5) * side
        for number in chosen:
            column = number // each * step + (number % each + 0.5) * wide / each
            axes.plot((at, column), (0.05, floor + side * routing.counts[number] + 0.08), color=INK, linewidth=1)
            axes.plot((column, at), (floor - 1.2, low + side + 0.05), color=INK, linewidth=1)
    across = RANKS * step - gap
    for y, text in ((-0.75, "dispatch"), (floor - 2.0, "combine")):
        axes.text(across / 2, y, text, fontsize=16, color=INK, ha="center", va="center",
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 4})
    axes.set_xlim(-0.1, across + 0.1)
    axes.set_ylim(low - 0.15, 1.7)
    axes.set_axis_off()
    return figure


def nodes() -> Picture:
    """Copies of one token that cross between servers: one for each expert, and one for each of four servers."""
    servers, inside = V3.groups, V3.routed // V3.groups
    limited = [(server * inside, server * inside + 9) for server in (0, 2, 3, 6)]
    figure = Picture(figsize=(6.4, 5.6), layout="constrained")
    axes = figure.subplots()
    for top, title, copies in ((0.0, "to each expert", [(e,) for e in CHOSEN]), (-5.2, "to four servers", limited)):
        axes.text(0, top + 1.95, f"{title}: {len(copies)} copies", fontsize=16, weight="bold", color=INK)
        start = (servers * 1.2 / 2 - 0.1, top + 1.5)
        square(axes, start[0] - 0.19, start[1], 0.38, EP)
        for s in range(servers):
            axes.add_patch(Rectangle((1.2 * s, top - 2.0), 1.0, 1.6, facecolor=PALE, edgecolor=INK, linewidth=1.2))
            axes.text(1.2 * s + 0.5, top - 2.1, f"{s}", fontsize=14, color=INK, ha="center", va="top")
        for experts in copies:
            server = experts[0] // inside
            places = [(1.2 * server + 0.2 + 0.6 * (e % inside) / inside + (0.3 if i else 0.0), top - 1.7)
                      for i, e in enumerate(experts)]
            for x, y in places:
                square(axes, x - 0.15, y, 0.3, EP)
            if len(experts) == 1:
                axes.add_patch(arrow(start, (places[0][0], top - 1.35)))
                continue
            gate = (1.2 * server + 0.5, top - 0.62)
            axes.add_patch(arrow(start, gate, 3.2))
            for x, y in places:
                axes.add_patch(arrow(gate, (x, y + 0.33), 1.0))
    axes.set_xlim(-0.1, servers * 1.2 - 0.1)
    axes.set_ylim(-7.9, 2.6)
    axes.set_axis_off()
    return figure


def full() -> Picture:
    """Loads of experts, and what two capacities would drop of them."""
    figure = Picture(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    share = sum(LOADS) / len(LOADS)
    limit = share * CAPACITIES[1]
    for i, load in enumerate(LOADS):
        axes.bar(i, min(load, limit), width=0.8, color=EP)
        axes.bar(i, max(0, load - limit), bottom=limit, width=0.8, color="none", edgecolor=EP, hatch="////",
                 linewidth=1.5)
        inside = load > 15
        axes.text(i, 3 if inside else load + 2, f"{load}", fontsize=14, color=on(EP) if inside else INK, ha="center")
    for capacity in CAPACITIES:
        axes.plot((-0.6, len(LOADS) - 0.5), (share * capacity,) * 2, color=INK, linewidth=1.6,
                  linestyle="--" if capacity > 1 else "-")
        axes.text(len(LOADS) - 0.4, share * capacity, f"{share * capacity:.0f}", fontsize=14, color=INK, va="center")
    axes.set_xticks(range(len(LOADS)), [str(i) for i in range(len(LOADS))])
    axes.set_xlim(-0.6, len(LOADS))
    axes.set_yticks([])
    axes.set_xlabel("expert", fontsize=14, color=INK)
    axes.tick_params(labelsize=14, labelcolor=INK, length=0)
    axes.spines[:].set_visible(False)
    return figure


def zipf(exponent: float) -> list[float]:
    """Loads of V3's experts, as the page has them."""
    load = [(i + 1) ** -exponent for i in range(V3.routed)]
    Random(0).shuffle(load)
    return load


def load() -> Picture:
    """What each of 64 ranks has to do: experts in their order, and with as many copies as ranks."""
    loads, ranks = zipf(0.5), 64
    cases = {"four experts a rank": plain(V3.routed, ranks),
             "five slots a rank": place(loads, ranks, V3.routed + ranks)}
    figure = Picture(figsize=(6.4, 4.6), layout="constrained")
    panels = figure.subplots(2, sharex=True, sharey=True)
    for axes, (title, placed) in zip(panels, cases.items(), strict=True):
        each = placed.loads(loads)
        mean = sum(each) / len(each)
        axes.bar(range(ranks), [one / mean for one in each], width=0.85, color=EP)
        axes.axhline(1, color=INK, linewidth=1.6)
        axes.set_title(f"{title}: the busiest has {placed.skew(loads):.2f}", fontsize=15, loc="left", color=INK)
        axes.set_yticks([0, 1, 2])
        axes.set_xticks([0, ranks - 1], [f"{LETTER}0", f"{LETTER}{ranks - 1}"])
        axes.tick_params(labelsize=14, labelcolor=INK, length=0)
        axes.spines[:].set_visible(False)
    return figure


def groups() -> Picture:
    """Eight ranks of data parallelism, four to a group of experts: along which lines what travels and is summed."""
    layout = Layout(dp=8, ep=RANKS)
    figure = Picture(figsize=(6.4, 4.9), layout="constrained")
    axes = figure.subplots()
    tints, wide, gap, tall = ladder(EP, layout.ep), 2.1, 0.75, 3.6
    for rank in range(layout.world_size):
        line, part = divmod(rank, layout.ep)
        x, y = part * (wide + gap), -line * tall
        axes.text(x + wide / 2, y + 0.12, f"{AXES['dp'].letter}{rank}", fontsize=15, weight="bold", color=INK,
                  ha="center")
        axes.add_patch(Rectangle((x, y - 1.0), wide, 0.9, facecolor=AXES["dp"].colour))
        axes.text(x + wide / 2, y - 0.55, "the rest", fontsize=14, color="white", ha="center", va="center")
        axes.add_patch(Rectangle((x, y - 2.1), wide, 1.0, facecolor=tints[part]))
        some = SMALL.routed // layout.ep
        axes.text(x + wide / 2, y - 1.6, f"{LETTER} {', '.join(str(part * some + i) for i in range(some))}",
                  fontsize=15, color=on(tints[part]), ha="center", va="center")
        if part:
            axes.add_patch(FancyArrowPatch((x - gap + 0.06, y - 1.6), (x - 0.06, y - 1.6), arrowstyle="<|-|>",
                                           mutation_scale=12, linewidth=2, color=INK, shrinkA=0, shrinkB=0))
        if line:
            axes.add_patch(FancyArrowPatch((x + wide / 2, y + tall - 2.15), (x + wide / 2, y + 0.75),
                                           arrowstyle="<|-|>", mutation_scale=12, linewidth=2, color=EP, shrinkA=0,
                                           shrinkB=0))
    low = -tall - 2.7
    for i, (colour, text) in enumerate(((INK, "tokens travel"), (EP, "gradients of experts are summed"),
                                        (AXES["dp"].colour, "gradients of the rest: over all 8"))):
        axes.add_patch(Rectangle((0, low - 0.62 * i - 0.1), 0.5, 0.2, facecolor=colour))
        axes.text(0.7, low - 0.62 * i, text, fontsize=14, color=INK, va="center")
    axes.set_xlim(-0.1, layout.ep * (wide + gap) - gap + 0.1)
    axes.set_ylim(low - 1.6, 0.8)
    axes.set_axis_off()
    return figure


def square(axes: Axes, x: float, y: float, side: float, colour: str) -> None:
    """A token."""
    axes.add_patch(Rectangle((x + 0.04, y + 0.04), side - 0.08, side - 0.08, facecolor=colour, edgecolor=INK,
                             linewidth=0.8))


def arrow(start: tuple[float, float], end: tuple[float, float], width: float = 1.8) -> FancyArrowPatch:
    """An arrow."""
    return FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=9 + 3 * width, linewidth=width, shrinkA=0,
                           shrinkB=0, color=INK)


def draw(folder: Path) -> None:
    """Write all pictures into `folder`."""
    pictures = {"experts_cut": cut(), "experts_nodes": nodes(), "experts_full": full(), "experts_load": load(),
                "experts_groups": groups()}
    for name, picture in pictures.items():
        picture.write_svg(folder / f"{name}.svg")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
