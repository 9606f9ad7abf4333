"""Dropout (Srivastava et al., 2014) whose masks can be drawn a second time.

What is drawn at random must be the same when backward computes a block again, and the same, or different, on the ranks
of a cut model. So a mask is a function of its seed. The seed is drawn once, before the block runs.
"""

from __future__ import annotations

import torch
from torch import nn


class Dropout(nn.Module):
    """In training, makes each number 0 with probability `p`, and multiplies the others by 1 / (1 − p).

    Seeds come from `generator`, PyTorch's default one if None. Raises ValueError on a p outside 0 ≤ p < 1.
    """

    def __init__(self, p: float):
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"dropout = {p}: give the probability that a number is dropped, from 0 to below 1")
        self.p = p
        self.generator: torch.Generator | None = None

    def draw(self) -> int | None:
        """The seed of the next mask, or None where nothing is dropped."""
        if not (self.training and self.p):
            return None
        return int(torch.randint(2**62, (), generator=self.generator))

    def forward(self, x: torch.Tensor, seed: int | None) -> torch.Tensor:
        """x, of any shape, with the mask of that `seed`. Kept for backward is a byte a number."""
        if seed is None:
            return x
        return x.masked_fill(dropped(x.shape, self.p, seed, x.device), 0).mul_(1 / (1 - self.p))


def dropped(shape: torch.Size, p: float, seed: int, device: torch.device) -> torch.Tensor:
    """Which numbers a mask drops: bools."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.empty(shape, dtype=torch.bool, device=device).bernoulli_(p, generator=generator)
