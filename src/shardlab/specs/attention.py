"""The weights of attention: grouped queries, and the two kinds that store keys and values in a compressed form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .check import flag, whole
from .tensor import TensorSpec, linear, norm

if TYPE_CHECKING:
    from .model import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention, MLA (DeepSeek-V2, arXiv:2405.04434, §2.1): what it compresses to, in elements.

    Keys and values of all heads are computed from one latent of `kv_rank` numbers a token, beside one rotated key of
    `rope_dim` that all heads share; both are what the cache holds. A head's query and key are `nope_dim` + `rope_dim`
    long, its value `value_dim`. Queries come from a latent of `q_rank`, or straight from the stream if it is None. RoPE
    turns neighbouring numbers together if `interleaved`, else those half of `rope_dim` apart. Raises ValueError on
    sizes that are no whole numbers above 0, and on an odd rope_dim.
    """

    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    q_rank: int | None = None
    interleaved: bool = True

    def __post_init__(self):
        for name in ("kv_rank", "rope_dim", "nope_dim", "value_dim"):
            whole(name, getattr(self, name))
        flag("interleaved", self.interleaved)
        if self.rope_dim % 2:
            raise ValueError(f"rope_dim = {self.rope_dim} must be even: RoPE turns pairs of numbers")
        if self.q_rank is not None:
            whole("q_rank", self.q_rank)

    @property
    def cached(self) -> int:
        """Numbers that the cache holds for a token and layer: one latent for keys and values, one rotated key."""
        return self.kv_rank + self.rope_dim

    def tensors(self, spec: ModelSpec) -> list[TensorSpec]:
        """The weights of one layer's attention. What leads down to a latent is whole on every rank."""
        h, heads, bias, query = spec.hidden, spec.heads, spec.attention_bias, self.nope_dim + self.rope_dim
        if self.q_rank is None:
            out = linear("self_attn.q_proj", (heads * query, h), "attention", "column", unit=query)
        else:
            out = linear("self_attn.q_a_proj", (self.q_rank, h), "attention", "whole", bias)
            out += norm("self_attn.q_a_layernorm", self.q_rank)
            out += linear("self_attn.q_b_proj", (heads * query, self.q_rank), "attention", "column", unit=query)
        out += linear("self_attn.kv_a_proj_with_mqa", (self.cached, h), "attention", "whole", bias)
        out += norm("self_attn.kv_a_layernorm", self.kv_rank)
        up = self.nope_dim + self.value_dim
        out += linear("self_attn.kv_b_proj", (heads * up, self.kv_rank), "attention", "column", unit=up)
        return out + linear("self_attn.o_proj", (h, heads * self.value_dim), "attention", "row", spec.output_bias,
                            unit=self.value_dim)


@dataclass(frozen=True, kw_only=True)
class Compressed:
    """DeepSeek-V4's attention, as far as its config.json tells: one KV head, cached once for several tokens.

    `ratios` holds (tokens that share an entry, layers that do so). The output goes through `out_groups` projections to
    `out_rank` numbers each, then back to the stream. The compressor's and the indexer's own weights, under 1% of the
    model, are left out. Raises ValueError on sizes that are no whole numbers above 0.
    """

    q_rank: int
    out_groups: int
    out_rank: int
    ratios: tuple[tuple[int, int], ...]

    def __post_init__(self):
        for name in ("q_rank", "out_groups", "out_rank"):
            whole(name, getattr(self, name))
        object.__setattr__(self, "ratios", tuple((whole("ratio", r), whole("layers", n)) for r, n in self.ratios))

    def tensors(self, spec: ModelSpec) -> list[TensorSpec]:
        """The weights of one layer's attention."""
        h, inner, d = spec.hidden, spec.heads * spec.head_dim, spec.head_dim
        group = inner // self.out_groups
        return [*linear("self_attn.q_a_proj", (self.q_rank, h), "attention", "whole"),
                *norm("self_attn.q_a_layernorm", self.q_rank),
                *linear("self_attn.q_b_proj", (inner, self.q_rank), "attention", "column", unit=d),
                *linear("self_attn.kv_proj", (d, h), "attention", "whole"),
                *linear("self_attn.o_a_proj", (self.out_groups * self.out_rank, group), "attention", "column",
                        unit=self.out_rank),
                *linear("self_attn.o_b_proj", (h, self.out_groups * self.out_rank), "attention", "row",
                        unit=self.out_rank)]


def grouped(spec: ModelSpec) -> list[TensorSpec]:
    """The weights of one layer's grouped-query attention: MHA with as many KV heads as heads, MQA with one."""
    h, d = spec.hidden, spec.head_dim
    query, key = spec.heads * d, spec.kv_heads * d
    out = linear("self_attn.q_proj", (query, h), "attention", "column", spec.attention_bias, unit=d)
    for name in ("k", "v"):
        out += linear(f"self_attn.{name}_proj", (key, h), "attention", "kv_heads", spec.attention_bias, unit=d)
    out += linear("self_attn.o_proj", (h, query), "attention", "row", spec.output_bias, unit=d)
    if spec.qk_norm:
        out += [*norm("self_attn.q_norm", d, "shared"), *norm("self_attn.k_norm", d, "shared")]
    if spec.sinks:
        out += [TensorSpec("self_attn.sinks", (spec.heads,), "attention", "column")]
    return out
