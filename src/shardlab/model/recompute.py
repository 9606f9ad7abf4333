"""Recomputation: what forward doesn't keep, backward computes again (Chen et al., arXiv:1604.06174).

"full" keeps a block's input and nothing of its inside, at the price of another forward pass. "selective" runs again
only what has no weights, the attention core (Korthikanti et al., arXiv:2205.05198, §5).
"""

from __future__ import annotations

from collections.abc import Callable
from operator import call
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ..specs.check import recompute_mode

Run = Callable[..., Any]  # run(fn, *args) calls fn(*args), in its way


def again(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(*args)`, for whose backward `args` alone are kept and `fn` is called again; without gradients, one call.

    What `fn` does besides (a log, a counter) is done twice, so it should do nothing. Collectives in it run a second
    time too, inside backward: but for those after the last tensor that backward needs, where PyTorch stops.
    """
    if not torch.is_grad_enabled():
        return fn(*args)
    # nothing is drawn at random in here (dropout takes its seeds along), so no generator's state has to be set back
    return checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=False)


def runs(recompute: str | None) -> tuple[Run, Run]:
    """How a block runs, and how the attention core in it. Raises ValueError on another mode."""
    modes: dict[str | None, tuple[Run, Run]] = {
        None: (call, call), "selective": (call, again), "full": (again, call)}
    return modes[recompute_mode(recompute)]
