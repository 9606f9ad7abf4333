"""What each rank holds: bytes of weights, gradients and optimizer states.

Exact, padding and copies included, for what `parallel.tensor.cut` leaves on a rank: the shapes come from
`TensorSpec.local_shape`. `training` and `serving` add what is held beside these states.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ..specs import Dtype, Format, Layout, ModelSpec, dtype_of, format_of
from ..specs.check import flag
from ..specs.layout import layout_of
from ..specs.model import GROUPS
from ..specs.storage import Packed
from ..specs.units import count, decimal
from .bill import Bill, Row

# numbers kept per parameter, and bytes kept per tensor: PyTorch's AdamW counts each tensor's steps in one fp32 number
_OPTIMIZERS = {"adamw": (2, 4), "sgd": (0, 0), "sgd+momentum": (1, 0)}
_UNTRAINED = (0, 0)


class Part(NamedTuple):
    """What a rank holds beside its states: `kind` ("KV cache"), bytes, how they come about, on "card" or "host"."""

    kind: str
    nbytes: int
    derivation: str
    on: Literal["card", "host"] = "card"


@dataclass(frozen=True, repr=False, eq=False)
class MemoryBill(Bill):
    """Bytes held by each rank; all ranks hold the same, since every cut so far pads to equal parts.

    `elements`, `tensors` and `stored` are the numbers of parameters (padding and copies included), of weight tensors
    and of bytes of weights that one rank holds, for each group of tensors. `optimizer` is None where nothing is
    trained, `master` where no copy of the weights is kept in another format. `parts` is what comes to the states.
    """

    spec: ModelSpec
    layout: Layout
    format: Format
    optimizer: str | None
    master: Dtype | None
    gradient: Dtype | None
    elements: dict[str, int]
    tensors: dict[str, int]
    stored: dict[str, int]
    copied: int
    padding: int
    parts: tuple[Part, ...] = ()
    task: str = ""

    @property
    def weights(self) -> int:
        """Bytes of weights, scales included."""
        return sum(self.stored.values())

    @property
    def gradients(self) -> int:
        """Bytes of gradients, one number a parameter."""
        return sum(self.elements.values()) * self.gradient.bytes if self.gradient else 0

    @property
    def master_weights(self) -> int:
        """Bytes of the copy of the weights that the optimizer steps, where training keeps one."""
        return sum(self.elements.values()) * self.master.bytes if self.master else 0

    @property
    def moments(self) -> int:
        """Bytes of the optimizer's numbers per parameter (AdamW's two moments, SGD's momentum), like what it steps."""
        return sum(self.elements.values()) * self._kept[0] * self._stepped.bytes

    @property
    def steps(self) -> int:
        """Bytes of AdamW's step counters, one a tensor."""
        return sum(self.tensors.values()) * self._kept[1]

    @property
    def states(self) -> int:
        """Bytes of all optimizer states: master weights, moments and steps."""
        return self.master_weights + self.moments + self.steps

    @property
    def per_rank(self) -> int:
        """All bytes that one rank's card holds."""
        return self.weights + self.gradients + self.states + sum(p.nbytes for p in self.parts if p.on == "card")

    @property
    def host(self) -> int:
        """Bytes that one rank keeps in its host's memory."""
        return sum(part.nbytes for part in self.parts if part.on == "host")

    def part(self, kind: str) -> int:
        """Bytes of the parts of that kind on the card: "KV cache", "activations", "logits", "context"; 0 if none."""
        return sum(part.nbytes for part in self.parts if part.kind == kind and part.on == "card")

    @property
    def groups(self) -> dict[str, int]:
        """Bytes of weights, gradients and states that one rank holds, for each group of tensors."""
        numbers, counter = self._kept
        each = (self.gradient.bytes if self.gradient else 0) + (self.master.bytes if self.master else 0)
        each += numbers * self._stepped.bytes
        return {group: self.stored[group] + n * each + self.tensors[group] * counter
                for group, n in self.elements.items()}

    @property
    def active(self) -> int:
        """Bytes of weights that one token uses on a rank, the whole embedding included: all, but of experts some."""
        return sum(_active(self.spec, group, nbytes) for group, nbytes in self.stored.items())

    @property
    def _kept(self) -> tuple[int, int]:
        return _OPTIMIZERS[self.optimizer] if self.optimizer else _UNTRAINED

    @property
    def _stepped(self) -> Dtype:
        """The format of what the optimizer steps, and keeps its moments in."""
        return self.master or dtype_of(self.format.rest.name)

    @property
    def title(self) -> str:
        ranks = f"on each of {self.layout.tp} ranks (tp = {self.layout.tp})" if self.layout.tp > 1 else "on one rank"
        return f"{self.spec.name}, {ranks}, " + (
            self.task or (f"trained with {self.optimizer}" if self.optimizer else "weights only"))

    @property
    def rows(self) -> list[Row]:
        held = sum(self.elements.values())
        rows = [self._group(group) for group, n in self.elements.items() if n]
        plain = self.format.matrix == self.format.expert == self.format.rest
        width = f"{self.format.rest.bits // 8} B" if plain else f"{self.weights / held:.4f} B"
        params = f"{_part(self.spec.total, held, self.layout.tp)} params × {width} ({self.format.name})"
        rows.append(Row("weights", params, self.weights, note=self._note(self.weights, self.active)))
        for label, dtype, kept in (("gradients", self.gradient, 1), ("master weights", self.master, 1),
                                   ("moments", self._stepped, self._kept[0])):
            if dtype and kept:
                times = f"{kept} × " if kept > 1 else ""
                text = f"{count(held)} × {times}{dtype.bytes} B ({dtype.name})"
                rows.append(Row(label, text, held * kept * dtype.bytes))
        if self.steps:
            rows.append(Row("steps", f"{sum(self.tensors.values())} tensors × {self._kept[1]} B (fp32)", self.steps))
        rows += [Row(part.kind, part.derivation, part.nbytes) for part in self.parts if part.on == "card"]
        rows.append(Row("each rank", " + ".join(r.label for r in rows if r.label[0] != " "), self.per_rank))
        away = [part for part in self.parts if part.on == "host"]
        return rows + [Row(f"{part.kind}, host", part.derivation, part.nbytes) for part in away]

    @property
    def footnotes(self) -> list[str]:
        if self.layout.tp == 1:
            return []
        return [f"Every rank holds the same. In all {count(self.copied)} numbers are copies of what another rank holds "
                f"too, {count(self.padding)} are padding."]

    def to_dict(self) -> dict[str, Any]:
        """The bill as plain data: inputs, bytes of one rank by kind and by group, parameter counts, parts, rows."""
        kinds = {kind: getattr(self, kind) for kind in
                 ("weights", "gradients", "master_weights", "moments", "steps", "per_rank", "host")}
        inputs = {"model": self.spec.name, "tp": self.layout.tp, "dtype": self.format.name, "optimizer": self.optimizer}
        parameters = {"resident": self.spec.total, "active": self.spec.active}
        return {**inputs, **kinds, "worst_rank": 0, "parameters": parameters, "groups": self.groups,
                "parts": [part._asdict() for part in self.parts], **super().to_dict()}

    def _group(self, group: str) -> Row:
        """The weights of one group: numbers × bytes, and scales × bytes, for each way that some of them are stored."""
        kinds: dict[Packed, list[int]] = {}
        for times, tensor in self.spec.counted():
            if tensor.group == group:
                shape = tensor.local_shape(self.layout.tp)
                packed = self.format.of(group, shape)
                sums = kinds.setdefault(packed, [0, 0, 0])
                for i, n in enumerate((tensor.size, math.prod(shape), packed.scales(shape))):
                    sums[i] += times * n
        text = " + ".join(_stored_as(packed, sums, self.layout.tp) for packed, sums in kinds.items())
        stored = self.stored[group]
        return Row(f"  {group}", text, stored, note=self._note(stored, _active(self.spec, group, stored)))

    def _note(self, resident: int, active: int) -> str:
        return f"active {decimal(active)}" if self.spec.experts and active != resident else ""


def memory(spec: ModelSpec, layout: Layout | None = None, dtype: str = "fp32", training: bool = False,
           optimizer: str = "adamw", master: str | None = None, gradients: str | None = None) -> MemoryBill:
    """The bill of what each rank holds of `spec` under `layout` (one rank if None), weights stored as `dtype`.

    `training` adds gradients and the states of `optimizer`: "adamw", "sgd" or "sgd+momentum", as PyTorch keeps them.
    `master="fp32"` is mixed precision: the optimizer steps a copy of the weights in fp32 and has its moments so. Then
    bf16 takes 16 bytes a parameter, 2 + 2 + 4 + 8 (ZeRO, arXiv:1910.02054, §3.1), and 18 with `gradients="fp32"`
    (Megatron-LM's main gradients). Weights in `master`'s own format are the master weights, and have no copy. Raises
    ValueError on an unknown format or optimizer, on quantised weights to be trained, and on a layout that `spec`
    doesn't allow.
    """
    flag("training", training)
    if not isinstance(optimizer, str) or optimizer not in _OPTIMIZERS:
        raise ValueError(f"unknown optimizer {optimizer!r}: use one of {', '.join(_OPTIMIZERS)}")
    layout, form = layout_of(layout), format_of(dtype)
    layout.check(spec)
    if not training and (master is not None or gradients is not None):
        raise ValueError(f"master = {master!r} and gradients = {gradients!r} are held in training: training=True")
    if training and not form.matrix == form.expert == form.rest:
        raise ValueError(f"weights stored as {form.name} are served, not trained here: train with fp32, bf16 or fp16")
    elements, tensors, stored = dict.fromkeys(GROUPS, 0), dict.fromkeys(GROUPS, 0), dict.fromkeys(GROUPS, 0)
    copied, p = 0, layout.tp
    for times, tensor in spec.counted():
        shape, group = tensor.local_shape(p), tensor.group
        elements[group] += times * math.prod(shape)
        tensors[group] += times
        stored[group] += times * form.of(group, shape).nbytes(shape)
        copied += times * tensor.size * (tensor.copies(p) - 1)
    padding = p * sum(elements.values()) - spec.total - copied
    copy = None if master is None or dtype_of(master).name == form.rest.name else dtype_of(master)
    gradient = dtype_of(form.rest.name if gradients is None else gradients) if training else None
    return MemoryBill(spec, layout, form, optimizer if training else None, copy, gradient, elements, tensors, stored,
                      copied, padding)


def checkpoint(spec: ModelSpec, dtype: object = None, copies: int = 0) -> int:
    """Bytes of the files that hold `spec` and its MTP modules, stored as `dtype` (None: as its weights are published).

    Modules share the embedding and the head of the model; `copies` is how often the files repeat the two all the same:
    DeepSeek-V3's do once (README_WEIGHTS.md). The files' headers are left out. Raises ValueError on an unknown format.
    """
    form = format_of(dtype or spec.stored)
    repeated = [(copies, t) for t in (*spec.first_tensors(), *spec.last_tensors()) if t.group in ("embedding", "head")]
    return sum(times * form.of(tensor.group, tensor.shape).nbytes(tensor.shape)
               for times, tensor in (*spec.counted(), *spec.mtp_counted(), *repeated))


def _active(spec: ModelSpec, group: str, nbytes: int) -> int:
    """What a token uses of `nbytes` of weights: of routed experts, those that it is sent to."""
    return nbytes * spec.experts.active // spec.experts.routed if spec.experts and group == "experts" else nbytes


def _part(whole: int, held: int, tp: int) -> str:
    return count(held) if tp == 1 else f"{count(whole)} → {count(held)}"


def _stored_as(packed: Packed, sums: list[int], tp: int) -> str:
    whole, held, scales = sums
    text = f"{_part(whole, held, tp)} × {packed.bits / 8:g} B ({packed.name})"
    return text + (f" + {count(scales)} scales × {packed.scale_bytes} B" if scales else "")
