"""The bill of what a rank holds, and what it can be asked."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from ..specs import Dtype, Format, Layout, ModelSpec
from .bill import Bill, Row
from .formats import Formats
from .memory_rows import active_of, notes_of, rows_of, title_of
from .places import Place, within
from .sharing import Share

# numbers kept per parameter, and bytes kept per tensor: PyTorch's AdamW counts each tensor's steps in one fp32 number
OPTIMIZERS = {"adamw": (2, 4), "sgd": (0, 0), "sgd+momentum": (1, 0)}
_UNTRAINED = (0, 0)


class Part(NamedTuple):
    """What a rank holds beside its states: `kind` ("KV cache"), bytes, how they come about, on "card" or "host"."""

    kind: str
    nbytes: int
    derivation: str
    on: Literal["card", "host"] = "card"


@dataclass(frozen=True, repr=False, eq=False)
class MemoryBill(Bill):
    """Bytes held by one rank. Tensor and expert parallelism cut into equal parts, padded if need be, so their ranks all
    hold as much; under ZeRO a few bytes may differ, and the bill is that of `rank`, at its `place` of the pipeline.

    `elements`, `tensors` and `stored` are the numbers of parameters (padding and copies included), of weight tensors
    and of bytes of weights that a rank holds where nothing is shared out, for each group of tensors; `share` is what is
    left to it. `optimizer` and `formats` are None where nothing is trained. `parts` is what comes to the states,
    `redundant` how many experts of each layer are copies of others.
    """

    spec: ModelSpec
    layout: Layout
    format: Format
    optimizer: str | None
    formats: Formats | None
    elements: dict[str, int]
    tensors: dict[str, int]
    stored: dict[str, int]
    copied: int
    padding: int
    share: Share
    rank: int
    redundant: int
    place: Place
    parts: tuple[Part, ...] = ()
    task: str = ""

    @property
    def weights(self) -> int:
        """Bytes of weights, scales included."""
        return self.share.weights * self.width if self.layout.zero else sum(self.stored.values())

    @property
    def gradients(self) -> int:
        """Bytes of gradients, a rank's own part of them included where it is kept apart."""
        return sum(n * dtype.bytes for n, dtype in self.kept_gradients)

    @property
    def master_weights(self) -> int:
        """Bytes of the copy of the weights that the optimizer steps, where training keeps one."""
        return self.share.stepped * self.master.bytes if self.master else 0

    @property
    def moments(self) -> int:
        """Bytes of the optimizer's numbers per parameter (AdamW's two moments, SGD's momentum), like what it steps."""
        return self.share.stepped * self.kept[0] * self.formats.stepped.bytes if self.formats else 0

    @property
    def steps(self) -> int:
        """Bytes of AdamW's step counters, one a tensor, or a piece of one."""
        return self.share.pieces * self.kept[1]

    @property
    def states(self) -> int:
        """Bytes of all optimizer states: master weights, moments and steps."""
        return self.master_weights + self.moments + self.steps

    @property
    def held(self) -> int:
        """Bytes of weights, gradients and optimizer states: what is held between steps."""
        return self.weights + self.gradients + self.states

    @property
    def per_rank(self) -> int:
        """All bytes that one rank's card holds."""
        return self.held + sum(p.nbytes for p in self.parts if p.on == "card")

    @property
    def host(self) -> int:
        """Bytes that one rank keeps in its host's memory."""
        return sum(part.nbytes for part in self.parts if part.on == "host")

    def part(self, kind: str) -> int:
        """Bytes of the parts of that kind on the card: "KV cache", "activations", "logits", "context"; 0 if none."""
        return sum(part.nbytes for part in self.parts if part.kind == kind and part.on == "card")

    @property
    def groups(self) -> dict[str, int]:
        """Bytes of weights, gradients and states that one rank holds, for each group of tensors. Raises ValueError
        where rows mix them, under ZeRO, and where weights are frozen."""
        if self.mixed:
            raise ValueError("gradients and states are not told by groups of tensors under ZeRO or with frozen "
                             "weights: ask for those of a layout with zero = 0, and nothing frozen")
        numbers, counter = self.kept
        each = self.formats.gradients.bytes + numbers * self.formats.stepped.bytes if self.formats else 0
        each += self.master.bytes if self.master else 0
        kept = {group: self.stored[group] + n * each + self.tensors[group] * counter
                for group, n in self.elements.items()}
        biases, routers = self.untrained
        return kept | {"router": kept["router"] - biases * each - routers * counter}

    @property
    def untrained(self) -> tuple[int, int]:
        """Numbers and tensors that a rule moves, not a gradient: by which routing is balanced. They are counted as wide
        as the rest, and have 32 bits, for they move by thousandths."""
        experts = self.spec.experts
        if experts is None or not experts.routing_bias:
            return 0, 0
        layers = sum(layer >= experts.first_dense for stage in self.place.stages for layer in stage.layers)
        return layers * experts.routed, layers

    @property
    def mixed(self) -> bool:
        """Whether groups of tensors can't be told apart in it."""
        frozen = self.optimizer is not None and self.share.pieces < sum(self.tensors.values()) - self.untrained[1]
        return self.layout.zero > 0 or frozen

    @property
    def active(self) -> int:
        """Bytes of weights that one token uses on a rank, the whole embedding included: all, but of experts some."""
        return sum(active_of(self, group, nbytes) for group, nbytes in self.stored.items())

    @property
    def coordinate(self) -> int:
        """Where the rank stands on the data axis."""
        return within(self.layout, self.rank) // self.layout.tp

    @property
    def kept(self) -> tuple[int, int]:
        """Numbers that the optimizer keeps for each parameter, and bytes for each tensor."""
        return OPTIMIZERS[self.optimizer] if self.optimizer else _UNTRAINED

    @property
    def master(self) -> Dtype | None:
        """The format of the master weights; None where the weights themselves are stepped."""
        return self.formats.stepped if self.formats and self.formats.stepped.name != self.format.rest.name else None

    @property
    def width(self) -> int:
        """Bytes of a number that isn't quantised."""
        return self.format.rest.bits // 8

    @property
    def kept_gradients(self) -> list[tuple[int, Dtype]]:
        """Numbers of gradients in their format: of all that is trained, of the rank's own part."""
        if self.formats is None:
            return []
        kinds = ((self.share.gradients, self.formats.gradients), (self.share.part, self.formats.part))
        return [(n, dtype) for n, dtype in kinds if n]

    @property
    def title(self) -> str:
        return title_of(self)

    @property
    def rows(self) -> list[Row]:
        return rows_of(self)

    @property
    def footnotes(self) -> list[str]:
        return notes_of(self)

    def to_dict(self) -> dict[str, Any]:
        """The bill as plain data: inputs, bytes of one rank by kind and (where they can be told) by group, parameter
        counts, parts, rows."""
        kinds = {kind: getattr(self, kind) for kind in
                 ("weights", "gradients", "master_weights", "moments", "steps", "per_rank", "host")}
        inputs = {"model": self.spec.name, **asdict(self.layout), "dtype": self.format.name,
                  "optimizer": self.optimizer}
        parameters = {"resident": self.spec.total, "active": self.spec.active}
        return {**inputs, **kinds, "worst_rank": self.rank, "parameters": parameters,
                "groups": {} if self.mixed else self.groups,
                "parts": [part._asdict() for part in self.parts], **super().to_dict()}
