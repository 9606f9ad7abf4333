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


def linear(name: str, shape: tuple[int, int], group: str, cut: Cut, bias: bool = False, unit: int = 1
           ) -> list[TensorSpec]:
    """A weight (out, in) and, if there is one, its bias (out): cut with the outputs, whole where the inputs are cut."""
    weight = TensorSpec(f"{name}.weight", shape, group, cut, unit)
    if not bias:
        return [weight]
    return [weight, TensorSpec(f"{name}.bias", shape[:1], group, "whole" if cut == "row" else cut, unit)]


def norm(name: str, size: int, cut: Cut = "whole", bias: bool = False) -> list[TensorSpec]:
    """The weight of a norm over `size` numbers, and the bias that LayerNorm has."""
    kinds = ("weight", "bias") if bias else ("weight",)
    return [TensorSpec(f"{name}.{kind}", (size,), "norms", cut) for kind in kinds]
