"""One weight tensor: its shape, and how tensor parallelism cuts it."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

Cut = Literal["column", "row", "vocab", "kv_heads", "shared", "whole"]


def padded(n: int, p: int) -> int:
    """The smallest multiple of `p` that is at least `n`: what `p` ranks share out equally."""
    return -(-n // p) * p


class TensorSpec(NamedTuple):
    """One weight, in its full shape and under its Hugging Face name (without the leading "model.").

    `cut` says what each of p ranks holds (Megatron-LM, arXiv:1909.08053, §3):

    - "column": an equal part of dim 0, the outputs; padded to a multiple of p
    - "row":    an equal part of dim 1, the inputs; padded to a multiple of p
    - "vocab":  an equal part of dim 0, the vocabulary; padded to a multiple of p
    - "kv_heads": an equal part of dim 0 as long as there is a KV head (`unit` rows) for each rank, else one head, of
      which several ranks hold copies
    - "shared": all of it, used on the rank's own heads only: the ranks' gradients are parts of a sum
    - "whole":  all of it, used alike by all: every rank has the full gradient
    """

    name: str
    shape: tuple[int, ...]
    group: str
    cut: Cut
    unit: int = 1

    @property
    def size(self) -> int:
        """Number of elements of the full tensor."""
        return math.prod(self.shape)

    def local_shape(self, p: int) -> tuple[int, ...]:
        """The shape that each of `p` ranks holds, padding included."""
        if self.cut in ("shared", "whole"):
            return self.shape
        dim = 1 if self.cut == "row" else 0
        part = max(self.unit, padded(self.shape[dim], p) // p)
        return (*self.shape[:dim], part, *self.shape[dim + 1 :])

    def copies(self, p: int) -> int:
        """How many of `p` ranks hold each element: `p` for whole tensors, 1 for cut ones, more for scarce KV heads."""
        if self.cut in ("shared", "whole"):
            return p
        return max(1, p * self.unit // self.shape[0]) if self.cut == "kv_heads" else 1
