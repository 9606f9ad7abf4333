"""A Llama in a GGUF file (llama.cpp's format) read as the plain model: its sizes, its weights dequantised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from tqdm.auto import tqdm

from ..specs import ModelSpec
from .parameters import distinct, materialise
from .transformer import Transformer

_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def read(path: str | Path) -> gguf.GGUFReader:
    """The file's metadata and tensors, memory-mapped. Raises ValueError on a file that is no GGUF."""
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError) as error:
        raise ValueError(f"{path} is no whole GGUF file: {error}") from None


def spec(file: gguf.GGUFReader, name: str) -> ModelSpec:
    """The sizes of the model in `file`. Raises ValueError where it is not a Llama, or scales its rotary embedding."""
    kind = value(file, "general.architecture")
    if kind != "llama":
        raise ValueError(f"the GGUF holds a model of architecture {kind!r}; only 'llama' is read")
    if scaled := [key for key in file.fields if key.startswith("llama.rope.scaling.")]:
        raise ValueError(f"the GGUF scales its rotary embedding ({', '.join(scaled)}), which is not read")
    hidden, heads = value(file, "llama.embedding_length"), value(file, "llama.attention.head_count")
    return ModelSpec(
        name=name,
        hidden=hidden,
        layers=value(file, "llama.block_count"),
        heads=heads,
        kv_heads=value(file, "llama.attention.head_count_kv", heads),
        head_dim=value(file, "llama.rope.dimension_count", hidden // heads),
        ffn=value(file, "llama.feed_forward_length"),
        vocab=len(value(file, "tokenizer.ggml.tokens")),
        tied=all(tensor.name != "output.weight" for tensor in file.tensors),
        norm_eps=_short(value(file, "llama.attention.layer_norm_rms_epsilon")),
        rope_theta=_short(value(file, "llama.rope.freq_base", 10000.0)),
        max_positions=value(file, "llama.context_length"),
    )


@torch.no_grad()
def model(file: gguf.GGUFReader, spec: ModelSpec) -> Transformer:
    """The plain model with the weights of `file`, in float32. Raises ValueError where a tensor is missing."""
    with torch.device("meta"):
        plain = Transformer(spec)
    materialise(plain)
    tensors = {tensor.name: tensor for tensor in file.tensors}
    for names, parameter in tqdm(distinct(plain), desc="dequantising", unit=" tensors"):
        source = _stored_name(names[0])
        if source not in tensors:
            raise ValueError(f"the GGUF lacks the tensor {source}")
        stored = tensors[source]
        rows = torch.from_numpy(gguf.dequantize(stored.data, stored.tensor_type).copy()).view(parameter.shape)
        if names[0].endswith(("q_proj.weight", "k_proj.weight")):
            rows = _halves_apart(rows, spec.head_dim)
        parameter.copy_(rows)
    return plain


def value(file: gguf.GGUFReader, key: str, default: Any = None) -> Any:
    """What the metadata say under `key`, or `default`. Raises ValueError where there is neither."""
    field = file.fields.get(key)
    if field is None and default is None:
        raise ValueError(f"the GGUF lacks the key {key}")
    return default if field is None else field.contents()


def _stored_name(name: str) -> str:
    """layers.3.mlp.up_proj.weight → blk.3.ffn_up.weight."""
    module, _, kind = name.rpartition(".")
    if not module.startswith("layers."):
        return f"{_NAMES[module]}.{kind}"
    _, layer, part = module.split(".", 2)
    return f"blk.{layer}.{_NAMES[part]}.{kind}"


def _halves_apart(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder the rows (heads · head_dim, hidden) of a query or key projection as Hugging Face's RoPE wants them.

    llama.cpp turns neighbouring dimensions 2i and 2i + 1 together, Hugging Face i and i + head_dim / 2; llama.cpp's
    converter reorders the rows of each head to suit, and this undoes it.
    """
    return rows.view(-1, head_dim // 2, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def _short(number: float) -> float:
    """The float64 with the few digits that were meant, of a number stored as float32 (9.99999974e-06 → 1e-05)."""
    return float(f"{number:.6g}")
