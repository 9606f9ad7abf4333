"""Which layouts a model allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .check import whole

if TYPE_CHECKING:
    from .layout import Layout
    from .model import ModelSpec


def check_model(layout: Layout, spec: ModelSpec, redundant: int) -> None:
    """Raise ValueError where `spec` can't be laid out so: see `Layout.check`."""
    if not hasattr(spec, "kv_heads"):
        raise TypeError(f"a layout cuts a ModelSpec, not {spec!r}: find_model('llama-3.1-70b') gives a bundled "
                        "one, ModelSpec.from_config(folder) your own")
    if not _fits(spec, layout.tp):
        allowed = [str(tp) for tp in range(1, spec.heads + 1) if _fits(spec, tp)]
        raise ValueError(
            f"tp = {layout.tp} does not cut the {spec.heads} heads and {spec.kv_heads} KV heads of {spec.name} into "
            f"whole heads; tp can be {', '.join(allowed)}")
    if layout.stages > spec.layers:
        cut = f"pp = {layout.pp}" + f" × chunks = {layout.chunks}" * (layout.stages > layout.pp)
        raise ValueError(f"{cut} makes {layout.stages} stages, and {spec.name} has {spec.layers} layers: some stages "
                         f"would have none; {spec.layers} stages at most")
    _check_experts(layout, spec, whole("redundant", redundant, 0))


def _check_experts(layout: Layout, spec: ModelSpec, redundant: int) -> None:
    if spec.experts is None:
        if layout.spreads or redundant:
            given = f"redundant = {redundant}" if redundant else f"ep = {layout.ep}, etp = {layout.expert_tp}"
            raise ValueError(f"{given}: {spec.name} has no experts; leave it out")
        return
    slots = spec.experts.routed + redundant
    if slots % layout.ep:
        fit = [n for n in divisors(layout.expert_sites) if slots % n == 0]
        named = f"{spec.experts.routed} experts" + f" and {redundant} redundant ones" * (redundant > 0)
        raise ValueError(f"ep = {layout.ep} does not share out the {named} of {spec.name} equally; on these "
                         f"{layout.stage_ranks} ranks ep can be {joined(fit)}")


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def joined(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _fits(spec: ModelSpec, tp: int) -> bool:
    if spec.latent:  # what the cache holds is whole on every rank
        return spec.heads % tp == 0
    if spec.compressed:
        return spec.heads % tp == 0 and spec.compressed.out_groups % tp == 0
    return spec.heads % tp == 0 and (spec.kv_heads % tp == 0 or tp % spec.kv_heads == 0)
