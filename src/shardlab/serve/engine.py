"""An engine: a model that is cut or not, its paged cache, and a scheduler that says step by step what is computed.

Rank 0 of a replica plans, and the others follow: what they need of a plan is token ids, positions and block tables. The
weights' cuts do the rest, as in training: a tensor axis sums inside the layers, a pipeline hands the stream on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch.distributed as dist

from ..model.transformer import Transformer
from .batch import Batch
from .kv_cache import BlockPool
from .pages import KVLayout, PagedCache
from .request import Answer, Limits, Request
from .runner import Choose, Runner, likeliest
from .scheduler import Policy, Scheduler

StepTime = Callable[[list[tuple[int, int]]], float]  # of a batch's `work`, seconds


class Clock(Protocol):
    """What tells the time, in seconds from the start of a run."""

    def begin(self) -> None:
        """A run starts: it is 0."""

    def now(self) -> float: ...

    def wait_until(self, when: float) -> None: ...

    def spend(self, batch: Batch) -> None:
        """The batch has been computed."""


class WallClock:
    """The machine's own time."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._start = time.monotonic()

    def now(self) -> float:
        return time.monotonic() - self._start

    def wait_until(self, when: float) -> None:
        if (left := when - self.now()) > 0:
            time.sleep(left)

    def spend(self, batch: Batch) -> None:
        pass


class VirtualClock:
    """Time that passes as `step_time` says, so that a run is the same each time, and on any machine."""

    def __init__(self, step_time: StepTime):
        self._now, self._step_time = 0.0, step_time

    def begin(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def wait_until(self, when: float) -> None:
        self._now = max(self._now, when)

    def spend(self, batch: Batch) -> None:
        self._now += self._step_time(batch.work)


class Engine:
    """A replica that answers requests. All its ranks make one, with the same arguments, and call `run` together.

    `group` are the replica's ranks, over which `model` is cut (None: it is on one). `blocks` of `block_size` tokens
    each are its cache, of `dtype` ("fp32", "bf16" or "int8"; the model's own if None). `together` is the group of ranks
    whose experts are shared, at the same place in other replicas: all of them step together, those with nothing to do
    with no tokens. `choose` makes tokens of logits, on one rank. `most` and `watermark` are the scheduler's.
    """

    def __init__(self, model: Transformer, *, blocks: int, block_size: int = 16, dtype: str | None = None,
                 policy: Policy | None = None, clock: Clock | None = None, group: dist.ProcessGroup | None = None,
                 together: dist.ProcessGroup | None = None, choose: Choose = likeliest, most: int = 256,
                 watermark: float = 0.0):
        layout = KVLayout.of(model, block_size, dtype)
        self.cache = PagedCache(layout, blocks, next(model.parameters()).device)
        self.runner = Runner(model, self.cache, group, together, choose)
        self.pool = BlockPool(blocks, block_size)
        self.scheduler = Scheduler(self.pool, policy, most=most, watermark=watermark,
                                   limits=Limits.of(model.spec))
        self.clock = clock or WallClock()
        self.log = list[tuple[list[tuple[int, int]], float]]()  # of each step, its work and its seconds
        self.plans = list[tuple]()  # and what was decided

    def run(self, requests: Sequence[Request] = ()) -> list[Answer]:
        """Answer the requests, each from its arrival on: on rank 0 their answers, in order; elsewhere none, and
        `requests` are not looked at. Raises ValueError where two have the same number."""
        if not self.runner.leads:
            while self.runner.run(None) is not None:
                pass
            return []
        numbers = [request.number for request in requests]
        if len(set(numbers)) < len(numbers):
            raise ValueError("two requests have the same number, by which the scheduler knows them")
        self.clock.begin()
        due = deque(sorted(requests, key=lambda request: request.arrival))
        answers = dict[int, Answer]()
        while True:
            while due and due[0].arrival <= self.clock.now():
                request = due.popleft()
                answers[request.number] = self.scheduler.add(request)
            if not self.step(bool(due)):
                return [answers[number] for number in numbers]
            if not self.runner.worked and due:
                self.clock.wait_until(due[0].arrival)

    def step(self, more: bool = False) -> bool:
        """Plan a step and compute it; False once there is nothing to do, neither here nor where experts are shared, and
        `more` is not to come. The leader calls it, and `run` on the other ranks."""
        batch, began = self.scheduler.step(), time.monotonic()
        if batch is None and more:
            batch = Batch([])
        tokens = self.runner.run(batch)
        if tokens is None:
            return False
        if batch is not None and batch.items:
            self.plans.append(batch.plan)
            self.clock.spend(batch)
            self.log.append((batch.work, time.monotonic() - began))
            self.scheduler.made(batch, tokens, self.clock.now())
        return True
