"""A card made of a GPU: the fraction of its memory that PyTorch's caching allocator may take.

What CUDA and NCCL take for themselves is not part of it. Not run where this was written, for want of a GPU.
"""

from __future__ import annotations

import gc

import torch

from ..specs.units import binary


class Gpu:
    """This process's GPU as a card of `budget` bytes."""

    kind = "cuda"
    missing = ""

    def __init__(self, budget: int):
        self._budget = budget

    def prepare(self) -> None:
        """Raises ValueError where the GPU has less than the budget."""
        self._total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        if self._budget > self._total:
            raise ValueError(f"a card of {binary(self._budget)} can't be had from a GPU of {binary(self._total)}")

    def used(self) -> int:
        """Bytes that the allocator has taken, blocks that are free for reuse included."""
        return torch.cuda.memory_reserved()

    def begin(self) -> None:
        """Give back what the run before has left in the cache."""
        gc.collect()
        torch.cuda.empty_cache()

    def limit(self) -> None:
        torch.cuda.set_per_process_memory_fraction(self._budget / self._total)

    def lift(self) -> None:
        torch.cuda.set_per_process_memory_fraction(1.0)
