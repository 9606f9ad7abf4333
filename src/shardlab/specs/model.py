"""What a model is: its sizes, and the table of its weights that every count and every bill is read from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .check import flag, number, whole
from .config import load_config, read_config
from .rope import RopeScaling
from .tensor import Cut, TensorSpec

GROUPS = ("embedding", "attention", "mlp", "norms", "head")


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The sizes of a decoder-only transformer: RMSNorm, RoPE, grouped-query attention, SwiGLU (Llama, Qwen, …).

    Sizes are in elements: `hidden` of the residual stream, `ffn` of the feed-forward block's inside, `head_dim` of one
    head. `attention_bias` is the bias of q, k and v, `output_bias` that of the attention's output projection, `qk_norm`
    an RMSNorm of head_dim on queries and keys, `tied` a head that shares the embedding's weight. `max_positions` is the
    context the model was made for, `torch_dtype` what its weights are published in. Raises ValueError on sizes that
    are no whole numbers above 0, on KV heads that don't divide the heads, on an odd head_dim (RoPE turns pairs).
    """

    name: str = "model"
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    max_positions: int = 2048
    torch_dtype: str | None = None

    def __post_init__(self):
        for size in ("hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocab", "max_positions"):
            whole(size, getattr(self, size))
        for choice in ("tied", "attention_bias", "output_bias", "mlp_bias", "qk_norm"):
            flag(choice, getattr(self, choice))
        number("norm_eps", self.norm_eps)
        number("rope_theta", self.rope_theta)
        if self.rope_scaling is not None and not isinstance(self.rope_scaling, RopeScaling):
            raise ValueError(f"rope_scaling must be a RopeScaling or None, not {self.rope_scaling!r}")
        if self.rope_theta <= 1:
            raise ValueError(f"rope_theta = {self.rope_theta:g} must be above 1: RoPE's frequencies are its powers")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.kv_heads} KV heads don't divide {self.heads} heads: each serves equally many")
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} must be even: RoPE turns pairs of numbers")

    @classmethod
    def from_config(cls, source: str | Path | dict[str, Any]) -> ModelSpec:
        """The spec of a Hugging Face config: a folder with a config.json, such a file, or its content as a dict.

        Reads model_type llama, mistral (without its window), qwen2 and qwen3 as transformers 5.24 does. Raises
        ValueError, naming the key, on a missing size, on a broken file and on what is not supported.
        """
        name, config = load_config(source)
        return cls(name=name, **read_config(config))

    @property
    def parameters(self) -> dict[str, int]:
        """Parameters in each group of tensors; a tied head is counted once, under embedding."""
        counts = dict.fromkeys(GROUPS, 0)
        for times, tensor in self.counted():
            counts[tensor.group] += times * tensor.size
        return counts

    @property
    def total(self) -> int:
        """All parameters."""
        return sum(self.parameters.values())

    def counted(self) -> Iterator[tuple[int, TensorSpec]]:
        """(how many there are, tensor) for each different weight; a layer's names lack their "layers.N."."""
        yield from ((1, tensor) for tensor in (*self.first_tensors(), *self.last_tensors()))
        yield from ((self.layers, tensor) for tensor in self.layer_tensors())

    def tensors(self) -> Iterator[TensorSpec]:
        """Every weight, in the model's order, under its Hugging Face name without the leading "model."."""
        yield from self.first_tensors()
        for layer in range(self.layers):
            for tensor in self.layer_tensors():
                yield tensor._replace(name=f"layers.{layer}.{tensor.name}")
        yield from self.last_tensors()

    def first_tensors(self) -> list[TensorSpec]:
        """The weights before the layers."""
        return [TensorSpec("embed_tokens.weight", (self.vocab, self.hidden), "embedding", "vocab")]

    def last_tensors(self) -> list[TensorSpec]:
        """The weights after the layers; a tied head is the embedding's weight and not listed again."""
        head = [] if self.tied else [TensorSpec("lm_head.weight", (self.vocab, self.hidden), "head", "vocab")]
        return [TensorSpec("norm.weight", (self.hidden,), "norms", "whole"), *head]

    def layer_tensors(self) -> list[TensorSpec]:
        """The weights of one layer."""
        h, d, ffn = self.hidden, self.head_dim, self.ffn
        query, key = self.heads * d, self.kv_heads * d
        out = [TensorSpec("input_layernorm.weight", (h,), "norms", "whole")]
        out += _linear("self_attn.q_proj", (query, h), "attention", "column", self.attention_bias, unit=d)
        for name in ("k", "v"):
            out += _linear(f"self_attn.{name}_proj", (key, h), "attention", "kv_heads", self.attention_bias, unit=d)
        out += _linear("self_attn.o_proj", (h, query), "attention", "row", self.output_bias, unit=d)
        if self.qk_norm:
            out += [TensorSpec(f"self_attn.{name}_norm.weight", (d,), "norms", "shared") for name in "qk"]
        out += [TensorSpec("post_attention_layernorm.weight", (h,), "norms", "whole")]
        for name in ("gate", "up"):
            out += _linear(f"mlp.{name}_proj", (ffn, h), "mlp", "column", self.mlp_bias)
        return out + _linear("mlp.down_proj", (h, ffn), "mlp", "row", self.mlp_bias)


def _linear(name: str, shape: tuple[int, int], group: str, cut: Cut, bias: bool, unit: int = 1) -> list[TensorSpec]:
    """A weight (out, in) and, if there is one, its bias (out): cut with the outputs, whole where the inputs are cut."""
    weight = TensorSpec(f"{name}.weight", shape, group, cut, unit)
    if not bias:
        return [weight]
    return [weight, TensorSpec(f"{name}.bias", shape[:1], group, "whole" if cut == "row" else cut, unit)]
