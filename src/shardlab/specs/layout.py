"""How a model is laid out over ranks: the degree of each cut, and which degrees a model allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .check import whole

if TYPE_CHECKING:
    from .model import ModelSpec


@dataclass(frozen=True)
class Layout:
    """The degrees of parallelism. `tp`: ranks that share each layer (tensor parallelism); 1 leaves it whole.

    Raises ValueError on degrees that are no whole numbers above 0.
    """

    tp: int = 1

    def __post_init__(self):
        whole("tp", self.tp)

    @property
    def world_size(self) -> int:
        """How many ranks the layout needs."""
        return self.tp

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


def _fits(spec: ModelSpec, tp: int) -> bool:
    if spec.latent:  # what the cache holds is whole on every rank
        return spec.heads % tp == 0
    if spec.compressed:
        return spec.heads % tp == 0 and spec.compressed.out_groups % tp == 0
    return spec.heads % tp == 0 and (spec.kv_heads % tp == 0 or tp % spec.kv_heads == 0)
