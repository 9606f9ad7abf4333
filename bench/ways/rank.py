"""What a rank does: it makes a way ready, then takes a step of it each time it is its turn, and says what that took."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from shardlab import comm

from .model import Step, reference

_steps: list[Step] = []  # this rank's way, which outlives a run: call these functions by the module, or it travels


def ready(group, kind: str, name: str) -> tuple[int, int]:
    """Make the way `name` of `kind`, and take two steps. The most bytes of tensors that are held between steps, and in
    one: as PyTorch's allocator counts them, whoever has asked for them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        make: Callable = reference if kind == "reference" else importlib.import_module(f"ways.{kind}").WAYS[name]
        _steps.append(make(group))
        _steps[0]()
        between = time.time_ns()
        _steps[0]()
    events = [each for each in seen.profiler.kineto_results.events() if each.name() == "[memory]"]
    held = most = rest = 0
    for each in sorted(events, key=lambda event: event.start_ns()):
        held += each.nbytes()
        most = max(most, held)
        if each.start_ns() < between:
            rest = held
    return rest, most


def turn(group, transport: str) -> tuple[float, float, float]:
    """A step, after all ranks have met: the seconds by the clock and of the processor, the rank's part of the loss."""
    dist.barrier()
    wall, processor = time.perf_counter(), time.process_time()
    with comm.use(transport=transport):
        loss = _steps[0]()
    return time.perf_counter() - wall, time.process_time() - processor, float(loss)


def peak(group) -> int:
    """The most bytes of memory that this process has had, the libraries it shares with others among them."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024
