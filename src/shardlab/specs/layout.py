"""How a model is laid out over ranks: the degree of each cut, and which degrees a model allows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from .check import whole

if TYPE_CHECKING:
    from .model import ModelSpec


@dataclass(frozen=True)
class Layout:
    """The degrees of parallelism; 1 leaves something whole.

    `tp`: ranks that share each layer (tensor parallelism). `dp`: ranks, or groups of tp ranks, that have one replica
    each and different data. `zero`: what the replicas share out among them (ZeRO's stage): 1 optimizer states, 2 also
    gradients, 3 also weights; 0 nothing. `sp`: whether what lies between the cut layers is cut along the sequence over
    the tp ranks (sequence parallelism); the input that a cut layer gathers is then kept for backward ("keep"), or
    gathered again ("again"). `cp`: ranks, or groups of tp ranks, that share each sequence (context parallelism).

    `ep`: ranks, or groups of `etp` ranks, that share a layer's experts (expert parallelism). They are ranks that the
    others make already, for which it doesn't count: tokens travel between them. `etp` is how many ranks share one
    expert: tp, which None stands for, or 1, where experts are whole and each of the tp ranks has a part of the tokens.

    Ranks that share a layer are neighbours, and then those that share a sequence: rank = (data coordinate · cp +
    context coordinate) · tp + tensor coordinate; rank // etp % ep is the part of the experts it has. Raises ValueError
    on degrees that are no whole numbers above 0, on a `zero` or `sp` that has no ranks to share among, on another
    `etp`, and on an ep that does not divide dp · cp · tp / etp.
    """

    tp: int = 1
    dp: int = field(default=1, kw_only=True)
    cp: int = field(default=1, kw_only=True)
    ep: int = field(default=1, kw_only=True)
    etp: int | None = field(default=None, kw_only=True)
    zero: int = field(default=0, kw_only=True)
    sp: Literal[False, "keep", "again"] = field(default=False, kw_only=True)

    def __post_init__(self):
        for degree in ("tp", "dp", "cp", "ep"):
            whole(degree, getattr(self, degree))
        if whole("zero", self.zero, 0) > 3:
            raise ValueError(f"zero = {self.zero} is no stage of ZeRO: 1 shares out optimizer states, 2 gradients too, "
                             "3 weights too, 0 nothing")
        if self.zero and self.data_ranks == 1:
            raise ValueError(f"zero = {self.zero} shares out over the ranks of the data axis, and dp = 1 is a single "
                             "one: give dp of 2 or more, or zero = 0")
        if self.sp is not False and self.sp not in ("keep", "again"):
            raise ValueError(f"sp must be False, 'keep' or 'again', not {self.sp!r}: what sequence parallelism gathers "
                             "is kept for backward, or gathered again")
        if self.sp and self.tp == 1:
            raise ValueError(f"sp = {self.sp!r} cuts the sequence over the ranks of the tensor axis, and tp = 1 is a "
                             "single one: give tp of 2 or more, or sp = False")
        self._check_experts()

    def _check_experts(self) -> None:
        if self.etp is not None and whole("etp", self.etp) not in (1, self.tp):
            raise ValueError(f"etp = {self.etp}: an expert is cut as the layers are, etp = tp = {self.tp}, or is whole "
                             "on a rank, etp = 1")
        if self._expert_sites % self.ep:
            among = f"dp · cp = {self.data_ranks}" if self.expert_tp == self.tp else f"dp · cp · tp = {self.world_size}"
            raise ValueError(f"ep = {self.ep} does not divide {among} ranks, which experts are shared out over: ep can "
                             f"be {_joined(_divisors(self._expert_sites))}")

    @property
    def world_size(self) -> int:
        """How many ranks the layout needs."""
        return self.data_ranks * self.tp

    @property
    def data_ranks(self) -> int:
        """Ranks, or groups of tp ranks, with tokens of their own: their gradients are summed, ZeRO shares out over
        them."""
        return self.dp * self.cp

    @property
    def expert_tp(self) -> int:
        """How many ranks share one expert."""
        return self.tp if self.etp is None else self.etp

    @property
    def expert_replicas(self) -> int:
        """How many ranks hold the same part of the same experts."""
        return self.world_size // (self.ep * self.expert_tp)

    @property
    def spreads(self) -> bool:
        """Whether experts lie over other ranks than the rest of the model."""
        return self.ep > 1 or self.expert_tp != self.tp

    @property
    def _expert_sites(self) -> int:
        """Ranks, or groups of etp ranks, that may have experts of their own."""
        return self.world_size // self.expert_tp

    @property
    def degrees(self) -> str:
        """The cuts that are made, in words: "dp = 4, tp = 2, ZeRO-3"; "tp = 1" where there are none."""
        axes = [f"{axis} = {getattr(self, axis)}" for axis in ("dp", "cp", "tp", "ep") if getattr(self, axis) > 1]
        axes = axes or ["tp = 1"]
        axes += ["etp = 1"] if self.expert_tp != self.tp else []
        more = [f"ZeRO-{self.zero}"] * (self.zero > 0) + [f"sequence parallel ({self.sp})"] * bool(self.sp)
        return ", ".join(axes + more)

    def check(self, spec: ModelSpec, redundant: int = 0) -> None:
        """Raise ValueError where `spec` can't be laid out so, with the numbers and the degrees that would do.

        Attention is cut by heads: tp divides the heads, and divides the KV heads or is a multiple of them (then several
        ranks hold the same KV head). Latent attention has no KV heads to cut. Feed-forward blocks (each
        expert's too) and the vocabulary are padded and ask for nothing. Each of the ep parts has equally many experts,
        `redundant` copies among them (`specs.placement`).
        """
        if not hasattr(spec, "kv_heads"):
            raise TypeError(f"a layout cuts a ModelSpec, not {spec!r}: find_model('llama-3.1-70b') gives a bundled "
                            "one, ModelSpec.from_config(folder) your own")
        if not _fits(spec, self.tp):
            allowed = [str(tp) for tp in range(1, spec.heads + 1) if _fits(spec, tp)]
            raise ValueError(
                f"tp = {self.tp} does not cut the {spec.heads} heads and {spec.kv_heads} KV heads of {spec.name} into "
                f"whole heads; tp can be {', '.join(allowed)}")
        self._check_experts_of(spec, whole("redundant", redundant, 0))

    def _check_experts_of(self, spec: ModelSpec, redundant: int) -> None:
        if spec.experts is None:
            if self.spreads or redundant:
                given = f"redundant = {redundant}" if redundant else f"ep = {self.ep}, etp = {self.expert_tp}"
                raise ValueError(f"{given}: {spec.name} has no experts; leave it out")
            return
        slots = spec.experts.routed + redundant
        if slots % self.ep:
            fit = [n for n in _divisors(self._expert_sites) if slots % n == 0]
            named = f"{spec.experts.routed} experts" + f" and {redundant} redundant ones" * (redundant > 0)
            raise ValueError(f"ep = {self.ep} does not share out the {named} of {spec.name} equally; on these "
                             f"{self.world_size} ranks ep can be {_joined(fit)}")


def layout_of(layout: Layout | None) -> Layout:
    """`layout`, or that of one rank for None. Raises TypeError on anything else, such as a bare degree."""
    if layout is not None and not isinstance(layout, Layout):
        raise TypeError(f"a layout is wanted, not {layout!r}: Layout(tp=8)")
    return layout or Layout()


def served(layout: Layout | None) -> Layout:
    """`layout_of`, where no training is meant. Raises ValueError where the layout cuts what inference doesn't hold, or
    cuts sequences or the stream between layers, whose inference is not known here."""
    layout = layout_of(layout)
    if layout.cp > 1:
        raise ValueError(f"{layout.degrees}: the inference of sequences that are cut over ranks is not reckoned with "
                         "here: leave cp out")
    if layout.zero or layout.sp:
        raise ValueError(f"{layout.degrees}: what ZeRO and sequence parallelism save is held in training, and they are "
                         "not reckoned with here: leave zero and sp out")
    return layout


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _joined(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _fits(spec: ModelSpec, tp: int) -> bool:
    if spec.latent:  # what the cache holds is whole on every rank
        return spec.heads % tp == 0
    if spec.compressed:
        return spec.heads % tp == 0 and spec.compressed.out_groups % tp == 0
    return spec.heads % tp == 0 and (spec.kv_heads % tp == 0 or tp % spec.kv_heads == 0)
