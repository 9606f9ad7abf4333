"""Linear layers cut over ranks: by their outputs, or by their inputs (Megatron-LM, arXiv:1909.08053, §3)."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ..model.parameters import Window
from ..specs import padded
from . import grads
from .sequence import Mode, leave
from .shard import parameter, window


class ColumnParallelLinear(nn.Linear):
    """Y_r = X W_rᵀ + b_r: some of the outputs, (…, in) → (…, out/p).

    Its input must have entered the region, by `sequence.enter`. That is left to the
    caller because layers which share their input (q, k and v; gate and up) then share
    one collective.
    """

    def __init__(self, whole: nn.Linear, rows: Window, size: int):
        biased = whole.bias is not None
        super().__init__(whole.in_features, size, bias=biased, device="meta")
        self.weight = parameter(whole.weight, rows, size)
        if whole.bias is not None:
            self.bias = parameter(whole.bias, rows, size)


class RowParallelLinear(nn.Linear):
    """Y = Σ_r X_r W_rᵀ + b: some of the inputs, (…, in/p) → (…, out), summed.

    With sequence parallelism a rank gets its rows of the sum: (rows, out).
    """

    def __init__(self, whole: nn.Linear, group: dist.ProcessGroup, mode: Mode = False):
        n, p = whole.in_features, group.size()
        size = padded(n, p) // p
        biased = whole.bias is not None
        super().__init__(size, whole.out_features, bias=biased, device="meta")
        self.group, self.mode = group, mode
        self.weight = parameter(whole.weight, window(n, p, group.rank(), dim=1), size)
        self.bias = whole.bias
        grads.mark(self, cut=group)
        if mode:  # each rank adds it to its own tokens
            grads.mark(self, "bias", partial=group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = leave(F.linear(x, self.weight), self.group, self.mode)
        # after the sum: a bias added on every rank would come p times
        return y if self.bias is None else y + self.bias
