"""Half a run tells the other half: how long a step takes is fitted to the first half of the requests, and the simulator
then plays the second, of which it knows no more than when each request comes and how long it is.

Three ways, each in real time: an engine that computes as fast as it can; one that waits in each step besides, as for a
card; and two replicas for prompts with two for answers, in four processes, which wait likewise, so that four of them
fit on two cores, and whose caches travel over a paced link.

    python bench/serving.py
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import torch

from shardlab.cost import StepFit, fit_steps, kv_handed
from shardlab.model import Transformer, initialise
from shardlab.serve import Answer, Batch, Engine, Request, Scheduler, mixed
from shardlab.serve.arrivals import poisson
from shardlab.serve.cluster import Cluster
from shardlab.serve.disagg import Workers
from shardlab.serve.events import Event, Instance, Stepped, Stream
from shardlab.serve.kv_cache import BlockPool
from shardlab.serve.metrics import Metrics
from shardlab.serve.replica import pools
from shardlab.serve.router import LeastOutstanding
from shardlab.serve.simulate import Simulated, StepTime, Wire
from shardlab.serve.workload import Lengths, synthetic
from shardlab.specs import LinkSpec, ModelSpec

SPEC = ModelSpec(name="small", hidden=256, layers=8, heads=4, kv_heads=2, head_dim=64, ffn=768, vocab=256)
BLOCKS, SEED, OFF = 400, 3, 0.15  # OFF: the aim, at most, of either median
FLOOR, TOKEN = 0.020, 0.0005  # seconds that a step waits, and that each of its tokens does
LINK = LinkSpec(name="paced", per_direction=20e6, alpha=1e-3)
Log = list[tuple[list[tuple[int, int]], float]]


def model(waits: bool) -> Transformer:
    """One whose first layer waits for what a card would take, or not."""
    made = initialise(Transformer(SPEC), seed=0)

    def wait(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        time.sleep(FLOOR + TOKEN * args[0].shape[1])

    if waits:
        made.layers[0].register_forward_pre_hook(wait)
    return made


def asked(rate: float, count: int) -> tuple[list[Request], list[Request]]:
    """Requests, and as many after them, on a clock that begins anew."""
    all_ = synthetic(poisson(rate, 2 * count, SEED), Lengths(60, 0.7, 200), Lengths(12, 0.5, 30), SPEC.vocab, SEED)
    start = all_[count].arrival - 0.1
    return all_[:count], [replace(each, arrival=each.arrival - start) for each in all_[count:]]


class Timed(Workers):
    """Workers whose steps are written down, by role."""

    def __init__(self, *args: object, **how: object):
        self.log = dict[str, Log]()
        self._begun = dict[str, float]()
        super().__init__(*args, **how)  # type: ignore[arg-type]

    def run(self, instance: Instance, batch: Batch, streams: Sequence[Stream] = ()) -> None:
        self._begun[instance.name] = time.monotonic()
        super().run(instance, batch, streams)

    def next(self) -> Event | None:
        event = super().next()
        if isinstance(event, Stepped):
            took = time.monotonic() - self._begun[event.instance.name]
            self.log.setdefault(event.instance.role, []).append((event.batch.work, took))
        return event


def one(waits: bool, rate: float, count: int) -> tuple[list[StepFit], list[Answer], list[Answer]]:
    """An engine by itself: (what is fitted, answers as simulated, answers as measured)."""

    def engine() -> Engine:
        return Engine(model(waits), blocks=BLOCKS, policy=mixed(64))

    first, second = asked(rate, count)
    engine().run([Request(0, [1] * 40, 4)])
    (seen := engine()).run(first)
    fitted = fit_steps(seen.log)
    instance = Instance("one", Scheduler(BlockPool(BLOCKS), mixed(64)))
    return [fitted], simulated([instance], lambda instance, work: fitted(work), None, second), engine().run(second)


def apart(rate: float, count: int) -> tuple[list[StepFit], list[Answer], list[Answer]]:
    """Two replicas for prompts, two for answers."""
    first, second = asked(rate, count)
    replicas = pools(2, 2, blocks=BLOCKS)
    with Timed(lambda: model(True), replicas, link=LINK) as world:
        cluster(world, world.instances()).run([Request(i, [i] * 40, 4) for i in range(4)])
        world.log.clear()
        cluster(world, world.instances()).run(first)
        fitted = {role: fit_steps(log) for role, log in world.log.items()}
        measured = cluster(world, world.instances()).run(second)
    wire = Wire(LINK, kv_handed(SPEC, 1, dtype="fp32"), SPEC.layers)
    instances = [replica.instance() for replica in replicas]
    return list(fitted.values()), simulated(instances, lambda instance, work: fitted[instance.role](work), wire,
                                            second), measured


def cluster(world: object, instances: list[Instance]) -> Cluster:
    return Cluster(world, instances, LeastOutstanding(Random(SEED)))  # type: ignore[arg-type]


def simulated(instances: list[Instance], step_time: StepTime, wire: Wire | None, requests: list[Request]
              ) -> list[Answer]:
    return cluster(Simulated(step_time, wire), instances).run(requests)


WAYS: dict[str, Callable[[], tuple[list[StepFit], list[Answer], list[Answer]]]] = {
    "one engine, computing": lambda: one(False, 12.0, 240),
    "one engine, waiting": lambda: one(True, 6.0, 120),
    "2 prefill + 2 decode": lambda: apart(12.0, 240)}


def main() -> None:
    print(f"{'fitted to the first half':<25}{'steps':>6}{'off':>6}   the second, medians: told, measured, ratio "
          f"(aim: within {OFF:.0%})")
    for name, way in WAYS.items():
        fits, told, real = way()
        line = f"{name:<25}{sum(len(fit.residuals) for fit in fits):>6}{max(fit.error for fit in fits):>6.1%}"
        for what in ("TTFT", "TPOT"):
            said, was = (Metrics(answers).percentile(what, 50) for answers in (told, real))
            line += f"   {what} {1e3 * said:6.1f} ms {1e3 * was:6.1f} ms {said / was:.2f}"
        print(line, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
