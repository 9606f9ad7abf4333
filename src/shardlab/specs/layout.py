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
    gathered again ("again").

    Ranks that share a layer are neighbours: rank = data coordinate · tp + tensor coordinate. Raises ValueError on
    degrees that are no whole numbers above 0, and on a `zero` or `sp` that has no ranks to share among.
    """

    tp: int = 1
    dp: int = field(default=1, kw_only=True)
    zero: int = field(default=0, kw_only=True)
    sp: Literal[False, "keep", "again"] = field(default=False, kw_only=True)

    def __post_init__(self):
        for degree in ("tp", "dp"):
            whole(degree, getattr(self, degree))
        if whole("zero", self.zero, 0) > 3:
            raise ValueError(f"zero = {self.zero} is no stage of ZeRO: 1 shares out optimizer states, 2 gradients too, "
                             "3 weights too, 0 nothing")
        if self.zero and self.dp == 1:
            raise ValueError(f"zero = {self.zero} shares out over the ranks of the data axis, and dp = 1 is a single "
                             "one: give dp of 2 or more, or zero = 0")
        if self.sp is not False and self.sp not in ("keep", "again"):
            raise ValueError(f"sp must be False, 'keep' or 'again', not {self.sp!r}: what sequence parallelism gathers "
                             "is kept for backward, or gathered again")
        if self.sp and self.tp == 1:
            raise ValueError(f"sp = {self.sp!r} cuts the sequence over the ranks of the tensor axis, and tp = 1 is a "
                             "single one: give tp of 2 or more, or sp = False")

    @property
    def world_size(self) -> int:
        """How many ranks the layout needs."""
        return self.dp * self.tp

    @property
    def degrees(self) -> str:
        """The cuts that are made, in words: "dp = 4, tp = 2, ZeRO-3"; "tp = 1" where there are none."""
        axes = [f"{axis} = {getattr(self, axis)}" for axis in ("dp", "tp") if getattr(self, axis) > 1] or ["tp = 1"]
        more = [f"ZeRO-{self.zero}"] * (self.zero > 0) + [f"sequence parallel ({self.sp})"] * bool(self.sp)
        return ", ".join(axes + more)

    def check(self, spec: ModelSpec) -> None:
        """Raise ValueError where `spec` can't be laid out so, with the numbers and the degrees that would do.

        Attention is cut by heads: tp divides the heads, and divides the KV heads or is a multiple of them (then several
        ranks hold the same KV head). Latent attention has no KV heads to cut. Feed-forward blocks (each
        expert's too) and the vocabulary are padded and ask for nothing.
        """
        if not hasattr(spec, "kv_heads"):
            raise TypeError(f"a layout cuts a ModelSpec, not {spec!r}: find_model('llama-3.1-70b') gives a bundled "
                            "one, ModelSpec.from_config(folder) your own")
        if not _fits(spec, self.tp):
            allowed = [str(tp) for tp in range(1, spec.heads + 1) if _fits(spec, tp)]
            raise ValueError(
                f"tp = {self.tp} does not cut the {spec.heads} heads and {spec.kv_heads} KV heads of {spec.name} into "
                f"whole heads; tp can be {', '.join(allowed)}")


def layout_of(layout: Layout | None) -> Layout:
    """`layout`, or that of one rank for None. Raises TypeError on anything else, such as a bare degree."""
    if layout is not None and not isinstance(layout, Layout):
        raise TypeError(f"a layout is wanted, not {layout!r}: Layout(tp=8)")
    return layout or Layout()


def served(layout: Layout | None) -> Layout:
    """`layout_of`, where no training is meant. Raises ValueError where the layout cuts what inference doesn't hold, or
    cuts the stream between layers, whose inference is not known here."""
    layout = layout_of(layout)
    if layout.zero or layout.sp:
        raise ValueError(f"{layout.degrees}: what ZeRO and sequence parallelism save is held in training, and they are "
                         "not reckoned with here: leave zero and sp out")
    return layout


def _fits(spec: ModelSpec, tp: int) -> bool:
    if spec.latent:  # what the cache holds is whole on every rank
        return spec.heads % tp == 0
    if spec.compressed:
        return spec.heads % tp == 0 and spec.compressed.out_groups % tp == 0
    return spec.heads % tp == 0 and (spec.kv_heads % tp == 0 or tp % spec.kv_heads == 0)
