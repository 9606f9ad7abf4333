"""One step of training on several ranks: our cuts beside PyTorch's own, all on the same model, batch and optimizer.

A Llama of 26 million parameters in fp32, 8 × 256 tokens, AdamW, one thread a rank. The reference is one process with
two threads, which knows nothing of ranks. The ways of a block take turns, a step each, so that what disturbs one
disturbs all; what is shown is the median over the turns of a way's time, the slowest rank's, ÷ that of the reference
(or of PyTorch's own) in the same turn. Exits with an error where the losses of all ways do not agree.

    python bench/parallel.py [ranks …] [--gloo] [--turns N] [--only WAY]      2 ranks, over shm, 10 turns when left out

That takes 10 minutes; the results in bench/results are those of `python bench/parallel.py 2 4 --gloo`, which takes 35.
With `--only 1F1B` the block that has it runs alone.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median

import torch
from ways import rank

from shardlab.launch import Ranks, ranks

AGREE = 1e-4  # of the loss; fp32, and the optimizer's first steps make much of little
BLOCKS = [  # PyTorch's own, and those of ours that do the same
    {"DDP": ["DP"], "ZeroRedundancyOptimizer": ["ZeRO-1"]},
    {"FSDP2, kept": ["ZeRO-2"], "FSDP2": ["ZeRO-3"]},
    {"DTensor TP": ["TP"], "DTensor TP+SP": ["TP+SP keep", "TP+SP again"]},
    {"pipelining GPipe": ["GPipe"], "pipelining 1F1B": ["1F1B", "zero bubble"],
     "pipelining interleaved": ["interleaved"]},
]
AIMS = {"DP": 1.06, "ZeRO-1": 1.06, "ZeRO-2": 1.10, "ZeRO-3": 1.10, "TP": 1.10, "TP+SP keep": 1.12,
        "TP+SP again": 1.12}  # time ÷ the reference's on 2 ranks over shm, at most
OF_PEERS = {"GPipe": 0.95, "1F1B": 0.9, "interleaved": 0.95}  # time ÷ PyTorch's own on 2 ranks; of all others 1


@dataclass
class Way:
    """One way on its own ranks, and what has been seen of it: by transport, a number a turn."""

    kind: str  # "reference", or the module in ways that has it
    name: str
    peer: str  # PyTorch's own that it is held against
    crew: Ranks
    transports: tuple[str, ...]
    held: int = 0  # bytes of tensors between steps, on the rank that holds most
    most: int = 0  # and at most, in a step
    peak: int = 0  # bytes of memory of the largest process
    losses: list[float] = field(default_factory=list)
    wall: dict[str, list[float]] = field(default_factory=dict)
    processor: dict[str, list[float]] = field(default_factory=dict)

    def ready(self) -> None:
        kind, name = self.kind, self.name
        sizes = self.crew.run(lambda group: rank.ready(group, kind, name))
        self.held, self.most = (max(each) for each in zip(*sizes, strict=True))

    def turn(self) -> None:
        for transport in self.transports:
            wall, processor, loss = zip(*self.crew.run(lambda group, by=transport: rank.turn(group, by)), strict=True)
            self.wall.setdefault(transport, []).append(max(wall))
            self.processor.setdefault(transport, []).append(sum(processor))
            self.losses.append(sum(loss))

    def end(self) -> None:
        self.peak = max(self.crew.run(lambda group: rank.peak(group)))


def measured(block: dict[str, list[str]], p: int, turns: int, gloo: bool) -> dict[str, Way]:
    """Each way of the block, on `p` ranks of its own, and the reference, after `turns` turns."""
    ours = ("shm", "backend") if gloo else ("shm",)
    with ExitStack() as stack:

        def way(kind: str, name: str, peer: str = "") -> Way:
            size, threads = (1, 2) if kind == "reference" else (p, 1)
            crew = stack.enter_context(ranks(size, backend="gloo", threads=threads, timeout=600))
            return Way(kind, name, peer, crew, ours if kind == "ours" else ("backend",))

        ways = [way("reference", "reference")]
        for peer, names in block.items():
            ways += [way("peers", peer), *(way("ours", name, peer) for name in names)]
        for each in ways:
            each.ready()
        for _ in range(turns):
            for each in ways:
                each.turn()
        for each in ways:
            each.end()
    return {each.name: each for each in ways}


def ratio(times: list[float], others: list[float]) -> float:
    return median(a / b for a, b in zip(times, others, strict=True))


def shown(ways: dict[str, Way], p: int) -> list[str]:
    """Print a row for each way and transport; what is over its aim, in words."""
    reference = ways["reference"].wall["backend"]
    missed = []
    for way in ways.values():
        for transport, wall in way.wall.items():
            name = f"{way.name}, {'gloo' if transport == 'backend' else transport}" if way.kind == "ours" else way.name
            by, aim = ratio(wall, reference), AIMS.get(way.name, "") if p == 2 and transport == "shm" else ""
            other = ratio(wall, ways[way.peer].wall["backend"]) if way.peer else ""
            print(f"{'  ' * bool(way.peer) + name:26} {median(wall):6.2f} s {by:6.3f} {aim:>5} "
                  f"{format(other, '.3f') if other else '':>7} {median(way.processor[transport]):8.2f} s "
                  f"{way.held / 2**20:8.0f} {way.most / 2**20:9.0f} {way.peak / 2**20:7.0f}")
            if aim and by > aim:
                missed.append(f"{p} ranks, {name}: {by:.3f} of the reference's time for {aim}")
            if other and other > (OF_PEERS.get(way.name, 1) if p == 2 else 1):
                missed.append(f"{p} ranks, {name}: {other:.3f} of the time of {way.peer}")
    return missed


def disagreeing(ways: dict[str, Way]) -> list[str]:
    """The ways of which a loss is not the reference's after as many steps, in words."""
    right = ways["reference"].losses
    return [f"{way.name}: losses {[round(loss, 5) for loss in way.losses]}, the reference's "
            f"{[round(loss, 5) for loss in right]}"
            for way in ways.values()
            if not all(abs(a - b) <= AGREE * b for a, b in zip(way.losses, right, strict=False))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", nargs="*", type=int, default=[2])
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--gloo", action="store_true", help="ours over gloo too")
    parser.add_argument("--only", help="the block with this way of ours")
    asked = parser.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's, which says when it starts and stops
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start; "
          f"medians of {asked.turns} steps\n")
    print(f"{'':26} {'a step':>8} {'÷ ref.':>6} {'aim':>5} {'÷ its':>7} {'processors':>10} {'held':>8} "
          f"{'in a step':>9} {'RSS MiB':>7}")
    missed, wrong = [], []
    for p in asked.ranks:
        for block in BLOCKS:
            if asked.only and asked.only not in [name for names in block.values() for name in names]:
                continue
            print(f"{p} ranks, load {os.getloadavg()[0]:.1f}", flush=True)
            ways = measured(block, p, asked.turns, asked.gloo)
            missed += shown(ways, p)
            wrong += disagreeing(ways)
    print("\n".join(["", "over their aim:", *missed] if missed else ["", "no aim is missed"]))
    if wrong:
        sys.exit("\n".join(["the losses do not agree:", *wrong]))
    print(f"the losses agree to {AGREE:g} of them, after each step")


if __name__ == "__main__":
    main()
