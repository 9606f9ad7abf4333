"""Which sizes a model can have: what `ModelSpec` refuses, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .attention import Compressed, Latent
from .check import flag, number, whole
from .experts import Experts
from .rope import RopeScaling

if TYPE_CHECKING:
    from .model import ModelSpec

_SIZES = ("hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocab", "max_positions")
_CHOICES = ("tied", "attention_bias", "output_bias", "mlp_bias", "qk_norm", "sinks", "learned_positions", "layer_norm",
            "gated")
_PARTS = {"rope_scaling": RopeScaling, "experts": Experts, "latent": Latent, "compressed": Compressed}


def check_sizes(spec: ModelSpec) -> None:
    """Raise ValueError, naming the size and what it may be, on a model that there can't be."""
    for size in _SIZES:
        whole(size, getattr(spec, size))
    for choice in _CHOICES:
        flag(choice, getattr(spec, choice))
    for size in ("norm_eps", "rope_theta"):
        number(size, getattr(spec, size))
    for part, kind in _PARTS.items():
        if not isinstance(getattr(spec, part), kind | None):
            raise ValueError(f"{part} must be a {kind.__name__} or None, not {getattr(spec, part)!r}")
    _heads(spec)
    _layers(spec)


def _heads(spec: ModelSpec) -> None:
    if spec.rope_theta <= 1:
        raise ValueError(f"rope_theta = {spec.rope_theta:g} must be above 1: RoPE's frequencies are its powers")
    if spec.heads % spec.kv_heads:
        raise ValueError(f"{spec.kv_heads} KV heads don't divide {spec.heads} heads: each serves equally many")
    if spec.rotated % 2:
        raise ValueError(f"head_dim = {spec.head_dim} must be even: RoPE turns pairs of numbers")
    if spec.latent and spec.compressed:
        raise ValueError("attention is latent or compressed, not both")
    if spec.compressed and spec.heads % spec.compressed.out_groups:
        raise ValueError(f"out_groups = {spec.compressed.out_groups} doesn't divide {spec.heads} heads")


def _layers(spec: ModelSpec) -> None:
    whole("mtp", spec.mtp, 0)
    whole("windowed_layers", spec.windowed_layers, 0)
    if spec.window is not None:
        whole("window", spec.window)
    if bool(spec.windowed_layers) != bool(spec.window):
        raise ValueError(f"window = {spec.window} and windowed_layers = {spec.windowed_layers}: give both or none")
    groups = {"windowed_layers": spec.windowed_layers,
              "first_dense": spec.experts.first_dense if spec.experts else 0,
              "layers of compressed.ratios": sum(n for _, n in spec.compressed.ratios) if spec.compressed else 0}
    for name, some in groups.items():
        if some > spec.layers:
            raise ValueError(f"{name} = {some} are more than the model's {spec.layers} layers")
