"""Draw the figures of chapter 10: what a step waits for, what it is made of, blocks that two requests share, and who
waits while a long prompt is read.

`python book/figures/serving.py [FOLDER]` writes serving_roofline.svg, serving_step.svg, serving_blocks.svg and
serving_timeline.svg. The last two are drawn from the library's own pool and scheduler.
"""

import sys
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle

from shardlab.cost import Speeds, bytes_read, decode_floor, serve_step
from shardlab.serve import Answer, Batch, BlockPool, Request, Scheduler, mixed, prefill_first
from shardlab.serve.kv_cache import ROOT
from shardlab.serve.scheduler import Policy
from shardlab.show.palette import AXES, HELD, INK, LINES, PALE, on
from shardlab.show.picture import Picture
from shardlab.specs import ClusterSpec, Layout, find_card, find_model

LLAMA, H100, TP8 = find_model("llama-3.1-70b"), find_card("h100"), Layout(tp=8)
STEP = serve_step(LLAMA, TP8, ClusterSpec.of("h100", 8), speeds=Speeds(share=0.5), sync=29e-6)
PROMPT, ANSWER = LINES[0], LINES[1]


def quiet(axes: Axes) -> None:
    axes.tick_params(labelsize=14, colors=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)


def roofline() -> Picture:
    """The least time of a step over the tokens in it: weights read, then numbers multiplied; and caches read."""
    figure = Picture(figsize=(6.4, 4.6), layout="constrained")
    axes = figure.subplots()
    ridge = H100.ridge("bf16")
    tokens = sorted([*(2**i for i in range(14)), ridge])
    read = bytes_read(LLAMA, TP8) / H100.hbm
    work = [2 * LLAMA.active * n / (TP8.tp * H100.flop_rate("bf16")) for n in tokens]
    requests = [2**i for i in range(10)]
    for context, style in ((1024, "--"), (8192, "-")):
        times = [1e3 * decode_floor(LLAMA, H100, TP8, batch=n, context=context) for n in requests]
        axes.plot(requests, times, color=HELD["KV cache"], linewidth=2.5, linestyle=style)
        x, y = (5, 42) if context == 8192 else (560, 6.4)
        axes.text(x, y, f"requests with caches\nof {context:,} tokens", fontsize=14, va="center", linespacing=1.1,
                  color=HELD["KV cache"])
    axes.plot(tokens, [1e3 * max(read, each) for each in work], color=INK, linewidth=3.5, zorder=3)
    axes.text(1.15, 1e3 * read * 0.78, "weights are read", fontsize=14, color=INK, va="top")
    axes.text(1500, 1e3 * work[-1] * 0.62, "numbers are\nmultiplied", fontsize=14, color=INK, ha="right", va="center",
              linespacing=1.1)
    axes.plot([ridge, ridge], [2.2, 1e3 * read], color=INK, linewidth=1, linestyle=":")
    axes.text(ridge, 2.1, f"ridge, {ridge:.0f} tokens", fontsize=14, color=INK, ha="center", va="top")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(1, 13000)
    axes.set_ylim(1.4, 260)
    axes.set_xticks([1, 10, 100, 1000, 8192], ["1", "10", "100", "1,000", "8,192"])
    axes.set_yticks([5, 10, 50, 100, 200], ["5", "10", "50", "100", "200"])
    axes.minorticks_off()
    axes.set_xlabel("tokens in a step", fontsize=14, color=INK)
    axes.set_ylabel("ms, at least", fontsize=14, color=INK)
    quiet(axes)
    return figure


PARTS = {"matrices": HELD["weights"], "attention": HELD["KV cache"], "tensor axis": AXES["tp"].colour}
NAMES = {"matrices": "matrices", "attention": "attention", "tensor axis": "sums of the tensor axis"}


def step() -> Picture:
    """What three steps of the 70B are made of, each as a bar of its whole."""
    works = {"one request, one token": [(1, 8192)], "64 requests, a token each": [(1, 8192)] * 64,
             "a prompt of 8,192 tokens": [(8192, 8192)]}
    figure = Picture(figsize=(6.4, 3.5), layout="constrained")
    axes = figure.subplots()
    for i, (name, work) in enumerate(works.items()):
        parts, left = STEP.parts(work), 0.0
        whole = sum(parts.values())
        axes.text(0, -i + 0.2, f"{name}: {1e3 * whole:.0f} ms", fontsize=14, color=INK, va="bottom")
        for part, colour in PARTS.items():
            wide = parts[part] / whole
            axes.add_patch(Rectangle((left, -i - 0.28), wide, 0.42, facecolor=colour))
            if wide > 0.06:
                axes.text(left + wide / 2, -i - 0.07, f"{wide:.0%}", fontsize=14, color=on(colour), ha="center",
                          va="center")
            left += wide
    axes.set_xlim(0, 1)
    axes.set_ylim(-2.4, 0.6)
    axes.set_axis_off()
    figure.legend(handles=[Patch(facecolor=colour, label=NAMES[part]) for part, colour in PARTS.items()],
                  loc="outside lower left", ncols=2, frameon=False, fontsize=14, handlelength=1, labelcolor=INK)
    return figure


SIZE = 4
FIRST, SECOND = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"], ["a", "b", "c"]


def tables() -> tuple[list[int], list[int], list[list[str]]]:
    """Two requests in a pool of ten blocks, which another has used before: their tables, and what is in each block."""
    pool, words = BlockPool(10, SIZE), [["" for _ in range(SIZE)] for _ in range(10)]
    gone = pool.take(7)  # some that others had, and gave back in this order
    for block in (3, 0, 5, 1, 6, 2, 4):
        pool.release([gone[block]])
    for block in pool.take(3):
        words[block] = ["another", "request's", "", ""]
    tokens = list(range(len(FIRST)))
    first = pool.take(pool.needed(len(tokens)))
    full = len(tokens) // SIZE
    pool.keep(first[:full], ROOT, tokens[: full * SIZE])
    begins = [*tokens[: 2 * SIZE], 100, 101, 102]
    shared, _ = pool.share(begins)
    second = shared + pool.take(pool.needed(len(begins)) - len(shared))
    for table, text in ((first, FIRST), (second, [*FIRST[: 2 * SIZE], *SECOND])):
        for at, word in enumerate(text):
            words[table[at // SIZE]][at % SIZE] = word
    return first, second, words


def blocks() -> Picture:
    """Two block tables, and the blocks they name: the first two are both requests'."""
    first, second, words = tables()
    figure = Picture(figsize=(6.4, 6.0), layout="constrained")
    axes = figure.subplots()
    high, left = 0.72, 3.2
    colours = {"A": LINES[0], "B": LINES[1]}
    for block, content in enumerate(words):
        users = [name for name, table in (("A", first), ("B", second)) if block in table]
        y = -block * 0.86
        face = colours[users[0]] if len(users) == 1 else LINES[2] if users else "#DDDDDD" if any(content) else PALE
        axes.add_patch(Rectangle((left, y), 4.4, high, facecolor=face, edgecolor=INK, linewidth=1))
        axes.text(left - 0.1, y + high / 2, str(block), fontsize=14, color=INK, ha="right", va="center")
        for i, word in enumerate(content):
            axes.text(left + 0.55 + 1.1 * i, y + high / 2, word, fontsize=14, color=on(face), ha="center", va="center")
    for name, table, y in (("A", first, -1.2), ("B", second, -5.4)):
        axes.text(0, y + 0.75, f"request {name}", fontsize=14, color=INK, va="bottom")
        for i, block in enumerate(table):
            down = y - i * 0.66
            axes.add_patch(Rectangle((0, down), 0.9, 0.6, facecolor="white", edgecolor=INK, linewidth=1.2))
            axes.text(0.45, down + 0.3, str(block), fontsize=14, color=INK, ha="center", va="center")
            axes.add_patch(FancyArrowPatch((0.95, down + 0.3), (left - 0.42, -block * 0.86 + high / 2), color=INK,
                                           arrowstyle="-|>", mutation_scale=12, linewidth=1,
                                           connectionstyle="arc3,rad=0.0"))
    axes.text(left, 0.95, "blocks of four tokens", fontsize=14, color=INK, va="bottom")
    axes.set_xlim(-0.1, left + 4.5)
    axes.set_ylim(-8.0, 1.4)
    axes.set_axis_off()
    return figure


def served(policy: Policy, requests: list[Request]) -> tuple[list[tuple[float, float, Batch]], list[Answer]]:
    """(start, end, batch) of each step of the 70B, and the answers: nothing is computed, every token is 0."""
    scheduler, clock = Scheduler(BlockPool(20_000), policy), 0.0
    steps, answers, due = list[tuple[float, float, Batch]](), list[Answer](), list(requests)
    while due or scheduler.busy:
        while due and due[0].arrival <= clock:
            answers.append(scheduler.add(due.pop(0)))
        batch = scheduler.step()
        if batch is None:
            clock = due[0].arrival
            continue
        start, clock = clock, clock + STEP(batch.work)
        steps.append((start, clock, batch))
        scheduler.made(batch, {item.number: 0 for item in batch.items if item.samples}, clock)
    return steps, answers


POLICIES = {"whole prompt first": prefill_first(8192), "in chunks of 512, first": prefill_first(512),
            "512 a step, answers first": mixed(512)}


def waited() -> dict[str, tuple[list[tuple[float, float, Batch]], list[Answer]]]:
    """Eight requests that are being answered when a prompt of 8,192 tokens comes, half a second later."""
    requests = [Request(i, range(1000 * i, 1000 * i + 256), 120) for i in range(8)]
    return {name: served(policy, [*requests, Request(8, range(10_000, 18_192), 20, arrival=0.5)])
            for name, policy in POLICIES.items()}


def timeline() -> Picture:
    """Steps from 0.4 s on, under three policies: in the upper lane those with tokens of the prompt, in the lower those
    with tokens of answers."""
    figure = Picture(figsize=(6.4, 4.9), layout="constrained")
    axes = figure.subplots()
    shown = 0.42, 1.12
    for i, (name, (steps, _)) in enumerate(waited().items()):
        top = -1.5 * i
        axes.text(1e3 * shown[0], top + 0.62, name, fontsize=14, color=INK, va="bottom")
        for start, end, batch in steps:
            if end < shown[0] or start > shown[1]:
                continue
            left, right = max(start, shown[0]), min(end, shown[1])
            long = any(item.number == 8 and not (item.samples and len(item.tokens) == 1) for item in batch.items)
            answers = any(len(item.tokens) == 1 for item in batch.items)
            for has, y, colour in ((long, top + 0.3, PROMPT), (answers, top, ANSWER)):
                if has:
                    axes.add_patch(Rectangle((1e3 * left, y), 1e3 * (right - left), 0.26, facecolor=colour,
                                             edgecolor="white", linewidth=0.7))
    for i in range(3):  # below each name
        axes.plot([500, 500], [-1.5 * i - 0.1, -1.5 * i + 0.6], color=INK, linewidth=1, linestyle=":")
    axes.text(506, -3.12, "the prompt comes", fontsize=14, color=INK, va="top")
    axes.set_xlim(1e3 * shown[0], 1e3 * shown[1])
    axes.set_ylim(-3.55, 1.0)
    axes.set_yticks([])
    axes.set_xlabel("ms", fontsize=14, color=INK)
    quiet(axes)
    axes.spines["left"].set_visible(False)
    figure.legend(handles=[Patch(facecolor=PROMPT, label="the long prompt"),
                           Patch(facecolor=ANSWER, label="a token for each of eight answers")],
                  loc="outside lower left", ncols=2, frameon=False, fontsize=14, handlelength=1, labelcolor=INK)
    return figure


def draw(folder: Path) -> None:
    """Write all pictures into `folder`."""
    for name, picture in (("roofline", roofline()), ("step", step()), ("blocks", blocks()), ("timeline", timeline())):
        picture.write_svg(folder / f"serving_{name}.svg")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
