"""Ways that take turns, each on ranks of its own, and what is shown of them."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median

from shardlab.launch import Ranks, ranks

from . import rank

AGREE = 1e-4  # of the loss; fp32, and the optimizer's first steps make much of little


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


def head() -> str:
    """The names of the columns that `shown` prints."""
    return (f"{'':26} {'a step':>8} {'÷ ref.':>6} {'aim':>5} {'÷ its':>7} {'processors':>10} {'held':>8} "
            f"{'in a step':>9} {'RSS MiB':>7}")


def shown(ways: dict[str, Way], p: int, of_reference: dict[str, float], of_peers: dict[str, float]) -> list[str]:
    """Print a row for each way and transport; in words, what is over its aim: its time ÷ the reference's over shm, and
    ÷ PyTorch's own, 1 for a way that `of_peers` lacks."""
    reference = ways["reference"].wall["backend"]
    missed = []
    for way in ways.values():
        for transport, wall in way.wall.items():
            name = f"{way.name}, {'gloo' if transport == 'backend' else transport}" if way.kind == "ours" else way.name
            by, aim = ratio(wall, reference), of_reference.get(way.name, "") if transport == "shm" else ""
            other = ratio(wall, ways[way.peer].wall["backend"]) if way.peer else ""
            print(f"{'  ' * bool(way.peer) + name:26} {median(wall):6.2f} s {by:6.3f} {aim:>5} "
                  f"{format(other, '.3f') if other else '':>7} {median(way.processor[transport]):8.2f} s "
                  f"{way.held / 2**20:8.0f} {way.most / 2**20:9.0f} {way.peak / 2**20:7.0f}")
            if aim and by > aim:
                missed.append(f"{p} ranks, {name}: {by:.3f} of the reference's time for {aim}")
            if other and other > of_peers.get(way.name, 1):
                missed.append(f"{p} ranks, {name}: {other:.3f} of the time of {way.peer}")
    return missed


def disagreeing(ways: dict[str, Way]) -> list[str]:
    """The ways of which a loss is not the reference's after as many steps, in words."""
    right = ways["reference"].losses
    return [f"{way.name}: losses {[round(loss, 5) for loss in way.losses]}, the reference's "
            f"{[round(loss, 5) for loss in right]}"
            for way in ways.values()
            if not all(abs(a - b) <= AGREE * b for a, b in zip(way.losses, right, strict=False))]


def conclude(missed: list[str], wrong: list[str]) -> None:
    """Print which aims are missed; exits with an error where losses do not agree."""
    print("\n".join(["", "over their aim:", *missed] if missed else ["", "no aim is missed"]))
    if wrong:
        sys.exit("\n".join(["the losses do not agree:", *wrong]))
    print(f"the losses agree to {AGREE:g} of them, after each step")
