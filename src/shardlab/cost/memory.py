"""What each rank holds: bytes of weights, gradients and optimizer states.

Exact, padding and copies included, for what `parallel.tensor.cut` leaves on a rank: the shapes come from
`TensorSpec.local_shape`. Activations and buffers are not in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..specs import Dtype, Layout, ModelSpec, dtype_of
from ..specs.layout import layout_of
from ..specs.model import GROUPS
from ..specs.units import count
from .bill import Bill, Row

# numbers kept per parameter, and bytes kept per tensor: PyTorch's AdamW counts each tensor's steps in one fp32 number
_OPTIMIZERS = {"adamw": (2, 4), "sgd": (0, 0), "sgd+momentum": (1, 0)}
_UNTRAINED = (0, 0)


@dataclass(frozen=True, repr=False)
class MemoryBill(Bill):
    """Bytes held by each rank; all ranks hold the same, since every cut pads to equal parts.

    `elements` and `tensors` are the numbers of parameters (padding and copies included) and of weight tensors that one
    rank holds, for each group of tensors. `optimizer` is None where nothing is trained.
    """

    spec: ModelSpec
    layout: Layout
    dtype: Dtype
    optimizer: str | None
    elements: dict[str, int]
    tensors: dict[str, int]
    copied: int
    padding: int

    @property
    def weights(self) -> int:
        """Bytes of weights."""
        return sum(self.elements.values()) * self.dtype.bytes

    @property
    def gradients(self) -> int:
        """Bytes of gradients, one number a parameter, in the weights' format."""
        return self.weights if self.optimizer else 0

    @property
    def moments(self) -> int:
        """Bytes of the optimizer's numbers per parameter: AdamW's two moments, SGD's momentum."""
        return self.weights * self._kept[0]

    @property
    def steps(self) -> int:
        """Bytes of AdamW's step counters, one a tensor."""
        return sum(self.tensors.values()) * self._kept[1]

    @property
    def states(self) -> int:
        """Bytes of all optimizer states: moments and steps."""
        return self.moments + self.steps

    @property
    def per_rank(self) -> int:
        """All bytes that one rank holds."""
        return self.weights + self.gradients + self.states

    @property
    def groups(self) -> dict[str, int]:
        """All bytes that one rank holds, for each group of tensors."""
        moments, counter = self._kept
        numbers = 1 + bool(self.optimizer) + moments
        return {group: n * numbers * self.dtype.bytes + self.tensors[group] * counter
                for group, n in self.elements.items()}

    @property
    def _kept(self) -> tuple[int, int]:
        return _OPTIMIZERS[self.optimizer] if self.optimizer else _UNTRAINED

    @property
    def title(self) -> str:
        ranks = f"on each of {self.layout.tp} ranks (tp = {self.layout.tp})" if self.layout.tp > 1 else "on one rank"
        return f"{self.spec.name}, {ranks}, " + (f"trained with {self.optimizer}" if self.optimizer else "weights only")

    @property
    def rows(self) -> list[Row]:
        each, whole = f"× {self.dtype.bytes} B ({self.dtype.name})", self.spec.parameters
        held = sum(self.elements.values())
        rows = [Row(f"  {group}", f"{_part(whole[group], n, self.layout.tp)} {each}", n * self.dtype.bytes)
                for group, n in self.elements.items() if n]
        rows.append(Row("weights", f"{_part(self.spec.total, held, self.layout.tp)} {each}", self.weights))
        if self.optimizer:
            rows.append(Row("gradients", f"{count(held)} {each}", self.gradients))
        if self.moments:
            rows.append(Row("moments", f"{count(held)} × {self._kept[0]} {each}", self.moments))
        if self.steps:
            rows.append(Row("steps", f"{sum(self.tensors.values())} tensors × {self._kept[1]} B (fp32)", self.steps))
        return [*rows, Row("each rank", " + ".join(r.label for r in rows if r.label[0] != " "), self.per_rank)]

    @property
    def footnotes(self) -> list[str]:
        if self.layout.tp == 1:
            return []
        return [f"Every rank holds the same. In all {count(self.copied)} numbers are copies of what another rank holds "
                f"too, {count(self.padding)} are padding."]

    def to_dict(self) -> dict[str, Any]:
        """The bill as plain data: inputs, bytes of one rank by kind and by group, rows."""
        kinds = {kind: getattr(self, kind) for kind in ("weights", "gradients", "moments", "steps", "per_rank")}
        inputs = {"model": self.spec.name, "tp": self.layout.tp, "dtype": self.dtype.name, "optimizer": self.optimizer}
        return {**inputs, **kinds, "groups": self.groups, **super().to_dict()}


def memory(spec: ModelSpec, layout: Layout | None = None, dtype: str = "fp32", training: bool = False,
           optimizer: str = "adamw") -> MemoryBill:
    """The bill of what each rank holds of `spec` under `layout` (one rank if None), all numbers in `dtype`.

    `training` adds gradients and the states of `optimizer`: "adamw", "sgd" or "sgd+momentum", as PyTorch keeps them.
    Raises ValueError on an unknown dtype or optimizer and on a layout that `spec` doesn't allow.
    """
    if optimizer not in _OPTIMIZERS:
        raise ValueError(f"unknown optimizer {optimizer!r}: use one of {', '.join(_OPTIMIZERS)}")
    layout = layout_of(layout)
    layout.check(spec)
    elements, tensors, copied = dict.fromkeys(GROUPS, 0), dict.fromkeys(GROUPS, 0), 0
    for times, tensor in spec.counted():
        elements[tensor.group] += times * math.prod(tensor.local_shape(layout.tp))
        tensors[tensor.group] += times
        copied += times * tensor.size * (tensor.copies(layout.tp) - 1)
    padding = layout.tp * sum(elements.values()) - spec.total - copied
    trained = optimizer if training else None
    return MemoryBill(spec, layout, dtype_of(dtype), trained, elements, tensors, copied, padding)


def kv_per_token(spec: ModelSpec, layout: Layout | None = None, dtype: str = "bf16") -> int:
    """Bytes of KV cache that each rank keeps for one token: a key and a value, in each layer, for each KV head it has.

    A rank has at least one KV head, so a tp beyond the KV heads saves nothing more. Raises ValueError like `memory`.
    """
    layout = layout_of(layout)
    layout.check(spec)
    return 2 * spec.layers * max(1, spec.kv_heads // layout.tp) * spec.head_dim * dtype_of(dtype).bytes


def _part(whole: int, held: int, tp: int) -> str:
    return count(held) if tp == 1 else f"{count(whole)} → {count(held)}"
