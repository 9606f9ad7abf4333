"""Predicted against measured: how long a step of training takes on this machine, in ten layouts.

Measured first: what each of 2 or 4 ranks computes and moves while all are busy (4 ranks on 2 cores have half a core
each), what a layer costs in which nothing is computed, and messages through shared memory, by gloo and over emulated
links, from which `cost.fit` has α and β. The part of the memory's rate that is reached, which stands for all that is no
matrix product, is fitted to a plain step: every rank has the whole model and sends nothing. With these, and nothing of
the ten, `cost.step_time` predicts them. Each is the same step, of the same 8 sequences. All take turns; a number is the
median over the turns, of the slowest rank's time.

    python bench/step_time.py [--turns N] [--to FOLDER]     4 turns when left out; step_time.md and .json in the folder
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import date
from functools import cached_property
from pathlib import Path
from statistics import correlation, mean, median

import torch
from ways import machine

from shardlab import cost
from shardlab.launch import Ranks, ranks
from shardlab.specs import CardSpec, ClusterSpec, Layout, LinkSpec, ModelSpec, Topology

SPEC = ModelSpec(hidden=256, layers=8, heads=4, kv_heads=2, head_dim=64, ffn=768, vocab=256)
BATCH, SEQ = 8, 256
SIZES = (2**10, 2**15, 2**18, 2**20)  # bytes of the messages that α and β are fitted to
CORRELATION, ERROR = 0.9, 0.25  # at least, and at most in the median


@dataclass(frozen=True)
class Case:
    """A layout whose ranks are on nodes of `per_node`, between which a link of `mb` megabytes a second is emulated; on
    one node, over shared memory, if that is None."""

    layout: Layout
    mb: int | None = None
    per_node: int = 1

    @property
    def ranks(self) -> int:
        return self.layout.world_size

    @property
    def link(self) -> str:
        return "shm" if self.mb is None else f"{self.mb} MB/s"

    @property
    def name(self) -> str:
        pipe = f" of {self.layout.microbatches} micro-batches" if self.layout.pp > 1 else ""
        near = next(axis for axis in reversed(self.layout.axes) if self.layout.axes[axis] > 1)
        return ", ".join([self.layout.degrees + pipe, *[f"{near} inside nodes"] * (self.per_node > 1), self.link])

    @property
    def way(self) -> dict:
        """How it is sent: what `comm.use` takes."""
        topology = None if self.mb is None else slowed(self.ranks // self.per_node, self.per_node, self.mb)
        return {"transport": "shm", "topology": topology}


def slowed(nodes: int, per_node: int, mb: int) -> Topology:
    """Nodes joined by a link so slow, a port a rank, that the machine's own time behind it hardly counts."""
    return Topology(nodes=nodes, per_node=per_node, nic="rank",
                    between=LinkSpec(name=f"{mb} MB/s", per_direction=mb * 1e6, alpha=1e-3))


CASES = [
    Case(Layout(dp=2)),
    Case(Layout(pp=2, microbatches=2)),
    Case(Layout(pp=2, microbatches=8), 20),
    Case(Layout(2, pp=2, microbatches=8), 50, 2),
    Case(Layout(2, dp=2), 20, 2),
    Case(Layout(dp=2), 20),
    Case(Layout(2, dp=2, order="pp-tp-dp"), 20, 2),
    Case(Layout(dp=2, zero=3), 20),
    Case(Layout(2), 50),
    Case(Layout(cp=2), 20),
]


class Seen:
    """What the turns have measured: a number each, by what it is of."""

    def __init__(self) -> None:
        self.speeds: defaultdict[int, list[tuple[float, ...]]] = defaultdict(list)  # by ranks: see `machine.speeds`
        self.plain: defaultdict[int, list[float]] = defaultdict(list)  # by ranks
        self.messages: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)  # by link: bytes and seconds
        self.steps: defaultdict[Case, list[float]] = defaultdict(list)

    def turn(self, crews: dict[int, Ranks]) -> None:
        for p, crew in crews.items():
            rates = crew.run(lambda group, tokens=BATCH * SEQ // p: machine.speeds(group, SPEC, tokens))
            self.speeds[p].append(tuple(map(mean, zip(*rates, strict=True))))
            self.plain[p].append(max(crew.run(lambda group: machine.turn(group, "plain"))))
        ways: dict[str, dict] = {"gloo": {}, "shm": {"transport": "shm"}}
        ways |= {case.link: {"topology": slowed(2, 1, case.mb)} for case in CASES if case.mb}
        for link, way in ways.items():
            self.messages[link] += crews[2].run(lambda group, way=way: machine.messages(group, SIZES, way))[0]
        for case in CASES:
            told = case.name, case.way
            self.steps[case].append(max(crews[case.ranks].run(lambda group, told=told: machine.turn(group, *told))))


@dataclass
class Predictor:
    """The machine as `cost.step_time` takes it, from what was seen of it; nothing of a case."""

    seen: Seen

    @cached_property
    def fits(self) -> dict[str, cost.Fit]:
        return {link: cost.fit((size, min(t for n, t in pairs if n == size)) for size in SIZES)
                for link, pairs in self.seen.messages.items()}

    def rank(self, p: int) -> tuple[float, float, float]:
        """FLOP/s, bytes a second, and seconds a layer, of one of `p` ranks."""
        rate, memory, overhead = (median(each) for each in zip(*self.seen.speeds[p], strict=True))
        return rate, memory, overhead

    def cluster(self, p: int, link: str, per_node: int, nodes: int) -> ClusterSpec:
        rate, memory, _ = self.rank(p)
        card = CardSpec(name=f"one of {p} ranks", printed=2**34, hbm=memory, flops={"fp32": rate})
        return ClusterSpec(name="this machine", card=card, per_domain=per_node, domains=nodes,
                           inside=self.fits["shm"].link("shm"), between=self.fits[link].link(link))

    def share(self, p: int) -> float:
        """The part of the memory's rate with which the plain step takes as long as it did."""
        low, high, alone = 0.0, 1.0, self.cluster(p, "shm", 1, 1)
        for _ in range(30):
            middle = (low + high) / 2
            slower = self.priced(Layout(), BATCH // p, alone, p, middle).seconds > median(self.seen.plain[p])
            low, high = (middle, high) if slower else (low, middle)
        return high

    def priced(self, layout: Layout, batch: int, cluster: ClusterSpec, p: int, share: float) -> cost.StepTime:
        speeds = cost.Speeds(share=1, memory=share, links=1, overlap=0, overhead=self.rank(p)[2],
                             measured=("card", "cluster", "memory", "overhead"))
        return cost.step_time(SPEC, layout, cluster, batch=batch, seq=SEQ, dtype="fp32", speeds=speeds)

    def step(self, case: Case) -> cost.StepTime:
        nodes = 1 if case.mb is None else case.ranks // case.per_node
        cluster = self.cluster(case.ranks, case.link, case.ranks // nodes, nodes)
        batch = BATCH // (case.layout.dp * case.layout.microbatches)
        return self.priced(case.layout, batch, cluster, case.ranks, self.share(case.ranks))


def places(numbers: list[float]) -> list[float]:
    """The place of each number among all, from 0; of equals, the mean of theirs."""
    return [sum(other < each for other in numbers) + (numbers.count(each) - 1) / 2 for each in numbers]


def shown(seen: Seen, turns: int) -> tuple[list[str], dict]:
    """The tables, in Markdown, and the same as plain data."""
    say = Predictor(seen)
    told = [(case, say.step(case), median(times)) for case, times in seen.steps.items()]
    ratios = [bill.seconds / measured for _, bill, measured in told]
    agree = correlation(places([bill.seconds for _, bill, _ in told]), places([measured for _, _, measured in told]))
    error = median(abs(ratio - 1) for ratio in ratios)
    span = max(bill.seconds for _, bill, _ in told) / min(bill.seconds for _, bill, _ in told)
    lines = ["| measured of a rank | GFLOP/s | memory GB/s | reached of it | ms a layer and pass | a plain step |",
             "|---|--:|--:|--:|--:|--:|"]
    for p in seen.speeds:
        rate, memory, overhead = say.rank(p)
        lines.append(f"| {p} ranks busy | {rate / 1e9:.1f} | {memory / 1e9:.1f} | {say.share(p):.3f} | "
                     f"{1e3 * overhead:.2f} | {median(seen.plain[p]):.2f} s |")
    lines += ["", "| link | α | β |", "|---|--:|--:|"]
    lines += [f"| {link} | {1e3 * fit.alpha:.3f} ms | {fit.beta / 1e6:,.0f} MB/s |" for link, fit in say.fits.items()]
    lines += ["", "| case | predicted | measured | from … to | predicted ÷ measured | longest part |",
              "|---|--:|--:|--:|--:|---|"]
    for (case, bill, measured), ratio in zip(told, ratios, strict=True):
        times = seen.steps[case]
        lines.append(f"| {case.name} | {bill.seconds:.2f} s | {measured:.2f} s | {min(times):.2f} … {max(times):.2f} | "
                     f"{ratio:.2f} | {bill.bottleneck} |")
    lines += ["", f"Rank correlation (Spearman) {agree:.2f} (aim: {CORRELATION} at least); median error {error:.0%} "
              f"(aim: {ERROR:.0%} at most); the predictions span {span:.1f}×."]
    cases = [{"name": case.name, "link": case.link, "layout": asdict(case.layout), "predicted": bill.seconds,
              "parts": bill.parts, "measured": measured, "times": seen.steps[case]} for case, bill, measured in told]
    ranked = {p: dict(zip(("flops", "memory", "overhead"), say.rank(p), strict=True)) | {"reached": say.share(p),
              "plain": median(seen.plain[p])} for p in seen.speeds}
    links = {link: {"alpha": fit.alpha, "beta": fit.beta} for link, fit in say.fits.items()}
    figures = {"parameters": SPEC.total, "cases": len(told), "rank_correlation": agree, "median_error": error,
               "span": span, "lowest": min(ratios), "highest": max(ratios),
               "slowest_link": min(case.mb for case in CASES if case.mb) * 10**6}
    return lines, {"turns": turns, "ranks": ranked, "links": links, "cases": cases, "figures": figures}


def hardware() -> Iterator[tuple[str, object]]:
    """This machine and its versions."""
    with open("/proc/cpuinfo") as file:
        name = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), platform.machine())
    yield from {"date": date.today().isoformat(), "processor": name, "cores": os.cpu_count(),
                "system": platform.platform(), "python": platform.python_version(), "torch": torch.__version__}.items()


def told_of(where: dict[str, object]) -> str:
    """The machine in words, as a page says it."""
    return (f"{where['cores']} cores ({where['processor']}), {platform.system()}, Python {where['python']}, "
            f"torch {where['torch']}, {where['date']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--to", type=Path, help="where step_time.md and step_time.json are written")
    asked = parser.parse_args()
    seen, where = Seen(), dict(hardware()) | {"load": round(os.getloadavg()[0], 1)}
    with ExitStack() as stack:
        crews = {p: stack.enter_context(ranks(p, backend="gloo", timeout=600)) for p in (2, 4)}
        for p, crew in crews.items():
            crew.run(lambda group, batch=BATCH // p: machine.plain(group, "plain", SPEC, batch, SEQ))
        for case in CASES:
            told = case.name, SPEC, case.layout, BATCH, SEQ, case.way
            crews[case.ranks].run(lambda group, told=told: machine.ready(group, *told))
        for _ in range(asked.turns):
            seen.turn(crews)
    lines, data = shown(seen, asked.turns)
    lines = [", ".join(f"{key} {value}" for key, value in where.items()) + f"; {asked.turns} turns", "", *lines]
    print("\n".join(lines))
    if asked.to:
        (asked.to / "step_time.md").write_text("# Step time, predicted and measured\n\n" + "\n".join(lines) + "\n")
        (asked.to / "step_time.json").write_text(json.dumps({"machine": told_of(where), **data}, indent=1) + "\n")


if __name__ == "__main__":
    main()
