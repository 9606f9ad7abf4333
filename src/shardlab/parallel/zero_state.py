"""The whole model again: its weights, and the optimizer's states as the plain optimizer has them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """All ranks have all weights in the block; what it changes there, alike on all ranks, stays."""
    reducer = getattr(model, "reducer", None)
    if reducer is None or not reducer.shards or reducer.weights.opened:
        yield
        return
    reducer.weights.open()
    try:
        yield
    finally:
        reducer.weights.close()
        with torch.no_grad():
            for parameter, part in reducer.copied():
                master = reducer.stepped[parameter]
                master.copy_(torch.where(part == master.to(part.dtype), master, part.float()))
