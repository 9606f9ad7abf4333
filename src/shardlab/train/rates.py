"""Learning rates over a run: pure functions from a step's number to a factor of each group's initial rate.

    train(model, optimizer, batches, range(1000), rate=partial(rates.cosine, steps=1000, warmup=100))

Since a step's factor depends on its number alone, a run that is taken up again needs no scheduler's state.
"""

from __future__ import annotations

import math

from torch.optim import Optimizer

INITIAL = "initial_lr"  # where PyTorch's own schedulers keep it in a group, and what `state_dict` so takes along


def cosine(step: int, steps: int, warmup: int = 0, least: float = 0.1) -> float:
    """Up in a line over `warmup` steps, then down half a cosine to `least` at `steps` (Loshchilov & Hutter,
    arXiv:1608.03983, without restarts). Raises ValueError on a warm-up that is not over before the end."""
    _check(steps, warmup, least)
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / (steps - warmup))
    return least + (1 - least) * (1 + math.cos(math.pi * done)) / 2


def stable(step: int, steps: int, warmup: int = 0, decay: int = 0, least: float = 0.1) -> float:
    """Warm-up, stable, decay: up in a line over `warmup` steps, 1, and down in a line to `least` over the last `decay`
    (Hu et al., arXiv:2404.06395, §4). Raises ValueError where warm-up and decay do not fit into `steps`."""
    _check(steps, warmup + decay, least)
    if step < warmup:
        return (step + 1) / warmup
    left = max(0, steps - step)
    return 1.0 if left >= decay else least + (1 - least) * left / decay


def apply(optimizer: Optimizer, factor: float) -> None:
    """Set each group's rate to `factor` of its initial one: the rate it had when this was first called."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault(INITIAL, group["lr"]) * factor


def _check(steps: int, taken: int, least: float) -> None:
    if taken < 0 or steps < 1 or taken > steps or (taken == steps and taken) or not 0 <= least <= 1:
        raise ValueError(f"warm-up (and decay) of {taken} of {steps} steps, down to {least:g} of the rate: give steps "
                         "of 1 or more, fewer of them to warm-up and decay, and a fraction")
