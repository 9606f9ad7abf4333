"""How fast the simulator is: 100,000 requests, 512 tokens in and 64 out on average, on 4 instances.

Processor time, of one process: a shared machine's clock tells of others, and its processors are slower while others use
them. The digest is of all times of all answers: with the same seed it is the same on any machine.

    python bench/simulator.py
"""

from __future__ import annotations

import hashlib
import time
from array import array
from random import Random

from shardlab.serve import Answer, BlockPool, Request, Scheduler, mixed, prefill_first
from shardlab.serve.arrivals import poisson
from shardlab.serve.cluster import Cluster
from shardlab.serve.events import Instance
from shardlab.serve.router import LeastOutstanding
from shardlab.serve.simulate import Simulated, Wire
from shardlab.serve.workload import Lengths, synthetic
from shardlab.specs import LinkSpec

COUNT, RATE, SEED, LIMIT = 100_000, 60.0, 24, 60.0
ROLES = {"4 that do both": ["both"] * 4, "2 prefill, 2 decode": ["prefill"] * 2 + ["decode"] * 2}
WIRE = Wire(LinkSpec(name="400 Gbit/s", per_direction=50e9, alpha=10e-6), 131_072, 32)


def step_time(instance: Instance, work: list[tuple[int, int]]) -> float:
    """A floor, new tokens, and context read."""
    tokens = read = 0
    for new, context in work:
        tokens += new
        read += context
    return 0.008 + 2e-5 * tokens + 1e-8 * read


def simulated(roles: list[str], requests: list[Request]) -> tuple[list[Answer], int, float]:
    """(The answers, how many steps were made, processor seconds)."""
    instances = [Instance(f"{role}{i}", Scheduler(BlockPool(8000), mixed(512) if role == "both" else prefill_first()),
                          role)  # type: ignore[arg-type]
                 for i, role in enumerate(roles)]
    steps = [0]

    def count(instance: Instance, batch: object) -> None:
        steps[0] += 1

    cluster = Cluster(Simulated(step_time, WIRE), instances, LeastOutstanding(Random(SEED)), watch=count)
    start = time.process_time()
    answers = cluster.run(requests)
    return answers, steps[0], time.process_time() - start


def digest(answers: list[Answer]) -> str:
    """Of when each token was made."""
    return hashlib.sha256(b"".join(array("d", answer.times).tobytes() for answer in answers)).hexdigest()[:12]


def line(name: str, requests: list[Request]) -> str:
    """What came of it; the answers are gone before the next ones come, and out of the garbage collector's way."""
    answers, steps, seconds = simulated(ROLES[name], requests)
    tokens = sum(len(answer.tokens) for answer in answers)
    return f"{name:<19}{steps:>9,}{tokens:>12,}{seconds:>9.1f}{len(requests) / seconds:>12,.0f}   {digest(answers)}"


def main(count: int = COUNT) -> None:
    requests = synthetic(poisson(RATE, count, SEED), Lengths(512, 1.0), Lengths(64, 0.7), 32_000, SEED)
    print(f"{count:,} requests   {'steps':>9}{'tokens':>12}{'seconds':>9}{'requests/s':>12}   digest   "
          f"(aim: {LIMIT:.0f} s)")
    for name in ROLES:
        print(line(name, requests), flush=True)


if __name__ == "__main__":
    main()
