"""What a model is: its sizes, and the table of its weights that every count and every bill is read from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from .attention import Compressed, Latent, grouped
from .config import load_config, read_config
from .experts import Experts, feed_forward
from .model_check import check_sizes
from .rope import RopeScaling
from .tensor import TensorSpec, linear, norm

GROUPS = ("embedding", "attention", "mlp", "experts", "shared", "router", "norms", "head")
Counted = tuple[tuple[int, TensorSpec], ...]


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The sizes of a decoder-only transformer, in elements.

    `hidden` of the residual stream, `ffn` of the inside of a dense feed-forward block, `head_dim` of one head;
    `kv_heads` as many as heads are MHA, one is MQA, between them GQA. Without more it is a Llama: RMSNorm, RoPE,
    SwiGLU.
    `attention_bias` is the bias of q, k and v, `output_bias` that of the attention's output projection, `qk_norm` an
    RMSNorm of head_dim on queries and keys, `tied` a head that shares the embedding's weight.

    `experts` replaces the feed-forward block, `latent` or `compressed` the attention. `windowed_layers` of the layers
    attend to the last `window` tokens only, `sinks` is one more number a head there (gpt-oss). `mtp` modules, each a
    further layer, predict tokens beyond the next (DeepSeek-V3, arXiv:2412.19437, §2.2); no count has them unless it
    says so. GPT-2 has `learned_positions`, `layer_norm` (with biases) and is not `gated`.

    `max_positions` is the context the model was made for, `torch_dtype` what it computes in, `stored` the format
    (`format_of`) that its weights are published in. Raises ValueError on sizes that are no whole numbers above 0, on KV
    heads that don't divide the heads, on an odd head_dim (RoPE turns pairs).
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
    stored: str | None = None
    experts: Experts | None = None
    latent: Latent | None = None
    compressed: Compressed | None = None
    mtp: int = 0
    window: int | None = None
    windowed_layers: int = 0
    sinks: bool = False
    learned_positions: bool = False
    layer_norm: bool = False
    gated: bool = True

    def __post_init__(self):
        check_sizes(self)

    @classmethod
    def from_config(cls, source: str | Path | dict[str, Any]) -> ModelSpec:
        """The spec of a Hugging Face config: a folder with a config.json, such a file, or its content as a dict.

        Reads model_type llama, mistral, qwen2, qwen3, mixtral, qwen3_moe, deepseek_v3, gpt_oss and gpt2 as transformers
        5.24 does. Raises ValueError, naming the key, on a missing size, on a broken file and on what is not supported.
        """
        name, config = load_config(source)
        return cls(name=name, **read_config(config))

    @property
    def parameters(self) -> dict[str, int]:
        """Parameters in each group of tensors; a tied head is counted once, under embedding."""
        return dict(self._parameters)

    @cached_property
    def _parameters(self) -> dict[str, int]:
        return self._sums(self.counted())

    @property
    def total(self) -> int:
        """All parameters that have to be resident, MTP modules left out."""
        return sum(self._parameters.values())

    @property
    def active_parameters(self) -> dict[str, int]:
        """Parameters in each group that one token uses: of the routed experts, those it is sent to."""
        counts = self.parameters
        if self.experts:
            counts["experts"] = counts["experts"] // self.experts.routed * self.experts.active
        return counts

    @property
    def active(self) -> int:
        """All parameters that one token uses, the whole embedding included (of which it reads one row)."""
        return sum(self.active_parameters.values())

    @property
    def rotated(self) -> int:
        """The dimensions of a head that RoPE turns."""
        return self.latent.rope_dim if self.latent else self.head_dim

    @property
    def beyond_plain(self) -> str:
        """What it has that the plain model of this library does not compute, in words; "" if there is nothing."""
        has = {"compressed attention": self.compressed, "experts with biases": self.experts and self.experts.bias,
               "a sliding window": self.window, "attention sinks": self.sinks,
               "learned positions": self.learned_positions, "LayerNorm": self.layer_norm,
               "a feed-forward block without a gate": not self.gated}
        return ", ".join(name for name, value in has.items() if value)

    @property
    def beyond_llama(self) -> str:
        """What it has that a Llama has not, in words; "" if there is nothing."""
        has = {"experts": self.experts, "latent attention": self.latent}
        own = [name for name, value in has.items() if value]
        return ", ".join([*own, self.beyond_plain] if self.beyond_plain else own)

    @property
    def mtp_total(self) -> int:
        """Parameters of the MTP modules, which share the model's embedding and head."""
        return sum(self._sums(self.mtp_counted()).values())

    def counted(self) -> Counted:
        """(how many there are, tensor) for each different weight; a layer's names lack their "layers.N."."""
        return self._counted

    @cached_property
    def _counted(self) -> Counted:
        ends = [(1, tensor) for tensor in (*self.first_tensors(), *self.last_tensors())]
        return (*ends, *((len(layers) * times, tensor) for layers, kind in self.kinds() for times, tensor in kind))

    def mtp_counted(self) -> Counted:
        """The same for the MTP modules: each is a layer of the last kind, two norms and a projection before it."""
        if not self.mtp:
            return ()
        h = self.hidden
        own = [*norm("enorm", h), *norm("hnorm", h), *norm("shared_head.norm", h),
               *linear("eh_proj", (h, 2 * h), "head", "whole")]
        return (*((self.mtp * times, tensor) for times, tensor in self.kinds()[-1][1]), *((self.mtp, t) for t in own))

    def tensors(self) -> Iterator[TensorSpec]:
        """Every weight, in the model's order, under its Hugging Face name without the leading "model."."""
        yield from self.first_tensors()
        for layers, _ in self.kinds():
            for layer in layers:
                for tensor in self.layer_tensors(layer):
                    yield tensor._replace(name=f"layers.{layer}.{tensor.name}")
        yield from self.last_tensors()

    def first_tensors(self) -> list[TensorSpec]:
        """The weights before the layers."""
        out = [TensorSpec("embed_tokens.weight", (self.vocab, self.hidden), "embedding", "vocab")]
        if self.learned_positions:
            out.append(TensorSpec("embed_positions.weight", (self.max_positions, self.hidden), "embedding", "whole"))
        return out

    def last_tensors(self) -> list[TensorSpec]:
        """The weights after the layers; a tied head is the embedding's weight and not listed again."""
        head = [] if self.tied else [TensorSpec("lm_head.weight", (self.vocab, self.hidden), "head", "vocab")]
        return [*norm("norm", self.hidden, bias=self.layer_norm), *head]

    def layer_tensors(self, layer: int = 0) -> list[TensorSpec]:
        """The weights of one layer, each expert's by its number."""
        kind = next(kind for layers, kind in self.kinds() if layer in layers)
        out = []
        for times, tensor in kind:
            if tensor.group != "experts":
                out.append(tensor)
            else:
                out += [tensor._replace(name=tensor.name.replace("experts.", f"experts.{e}.")) for e in range(times)]
        return out

    def kinds(self) -> list[tuple[range, list[tuple[int, TensorSpec]]]]:
        """The kinds of layers: which layers, and (how many in a layer, tensor) for each different weight.

        One kind, or dense layers first and then those with experts.
        """
        return self._kinds

    @cached_property
    def _kinds(self) -> list[tuple[range, list[tuple[int, TensorSpec]]]]:
        dense = self.experts.first_dense if self.experts else self.layers
        kinds = [(range(dense), self._layer(self._dense()))] if dense else []
        if self.experts and dense < self.layers:
            kinds.append((range(dense, self.layers), self._layer(self._mixture(self.experts))))
        return kinds

    def _layer(self, block: list[tuple[int, TensorSpec]]) -> list[tuple[int, TensorSpec]]:
        kind = self.latent or self.compressed
        attention = kind.tensors(self) if kind else grouped(self)
        before, after = (norm(name, self.hidden, bias=self.layer_norm)
                         for name in ("input_layernorm", "post_attention_layernorm"))
        return [*((1, tensor) for tensor in (*before, *attention, *after)), *block]

    def _dense(self) -> list[tuple[int, TensorSpec]]:
        return [(1, t) for t in feed_forward("mlp", self.hidden, self.ffn, "mlp", self.mlp_bias, self.gated)]

    def _mixture(self, experts: Experts) -> list[tuple[int, TensorSpec]]:
        h = self.hidden
        return [*((1, t) for t in experts.router(h)), *((experts.routed, t) for t in experts.one(h)),
                *((1, t) for t in experts.sharing(h))]

    @staticmethod
    def _sums(counted: Counted) -> dict[str, int]:
        counts = dict.fromkeys(GROUPS, 0)
        for times, tensor in counted:
            counts[tensor.group] += times * tensor.size
        return counts
