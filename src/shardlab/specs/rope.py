"""How rotary position embeddings are stretched to longer contexts, as a Hugging Face config says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .check import flag, number, whole

_NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "beta_fast", "beta_slow"),
}
_OPTIONAL = ("attention_factor", "mscale", "mscale_all_dim")


@dataclass(frozen=True)
class RopeScaling:
    """A scaling of RoPE's frequencies. `kind` is "linear" (positions divided by `factor`), "llama3" or "yarn".

    The other fields have their Hugging Face names. `low_freq_factor` and `high_freq_factor` are llama3's; the last six
    are yarn's (arXiv:2309.00071), with the defaults of transformers 5.24. Raises ValueError on an unknown `kind`, on a
    missing or impossible number.
    """

    kind: str
    factor: float
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self):
        if self.kind not in _NEEDED:
            raise ValueError(f"rope_type {self.kind!r} is not supported: use one of default, {', '.join(_NEEDED)}")
        for name in _NEEDED[self.kind]:
            if getattr(self, name) is None:
                raise ValueError(f"rope_type {self.kind!r} needs the key {name!r}")
            number(name, getattr(self, name))
        for name in _OPTIONAL:
            if getattr(self, name) is not None:
                number(name, getattr(self, name))
        flag("truncate", self.truncate)
        if self.kind != "linear":
            whole("original_max_position_embeddings", self.original_max_position_embeddings)
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and low >= high:
            raise ValueError(f"low_freq_factor = {low} must be below high_freq_factor = {high}")


def read_rope(config: dict[str, Any], max_positions: int) -> tuple[float, RopeScaling | None]:
    """(rope_theta, scaling) of a config, in the old keys (`rope_theta`, `rope_scaling`) or the new `rope_parameters`.

    Defaults are those of transformers 5.24 (modeling_rope_utils.py): theta 10000, no scaling, an original context of
    `max_positions`. Raises ValueError on what is not supported, naming key and value.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"rope_scaling and rope_parameters are objects with a rope_type, not {rope!r}")
    if nested := [key for key, value in rope.items() if isinstance(value, dict)]:
        raise ValueError(f"rope_parameters differ by layer type ({', '.join(nested)}): one RoPE for all is supported")
    theta = number("rope_theta", rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise ValueError(f"partial_rotary_factor = {partial} is not supported: only whole heads are rotated")
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    return theta, None if kind == "default" else _scaling(kind, config, rope, max_positions)


def _scaling(kind: str, config: dict[str, Any], rope: dict[str, Any], max_positions: int) -> RopeScaling:
    names = ("factor", *_NEEDED.get(kind, ()), *_OPTIONAL, "truncate")
    given: dict[str, Any] = {"factor": None} | {name: rope[name] for name in names if rope.get(name) is not None}
    if kind == "linear":
        return RopeScaling(kind, given["factor"])
    key = "original_max_position_embeddings"
    given[key] = config.get(key, rope.get(key, max_positions))  # the top level comes first, as in transformers
    if kind == "yarn" and "factor" in rope and rope["factor"] is None:  # null: the ratio of the two contexts
        given["factor"] = max_positions / whole(key, given[key])
    return RopeScaling(kind, **given)
