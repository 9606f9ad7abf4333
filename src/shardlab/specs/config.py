"""Reading a Hugging Face config.json: what each model type means by its keys, and by leaving them out.

The facts are transformers 5.24's (configuration_*.py and modeling_*.py of each model type). A key that transformers
documents as optional takes its default; a missing key that sizes the model is refused by name; so is what the model
here can't compute, with the key and its value.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .check import flag, number, whole
from .rope import read_rope


@dataclass(frozen=True)
class _Family:
    """What differs between model types: which biases there are, and the defaults of keys left out.

    `attention_bias` is "qkv" (always on q, k, v, never on o) or "key" (on all four if the key `attention_bias` says so)
    or None (never). `head_dim` None stands for hidden_size / num_attention_heads.
    """

    max_positions: int
    attention_bias: str | None = None
    mlp_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    kv_heads_optional: bool = False
    window: bool = False


_FAMILIES = {
    "llama": _Family(2048, attention_bias="key", mlp_bias=True, kv_heads_optional=True),
    "mistral": _Family(131072, window=True),
    "qwen2": _Family(32768, attention_bias="qkv"),
    "qwen3": _Family(32768, attention_bias="key", qk_norm=True, head_dim=128),
}
_SUPPORTED = f"supported are dense decoders of model_type {', '.join(_FAMILIES)}"
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_LATENT = ("kv_lora_rank", "q_lora_rank")


def load_config(source: str | Path | dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """(name, config) from a folder with a config.json, a JSON file, or a dict. The name is the folder's or file's.

    Raises ValueError on text that is no JSON object, with the place where it broke off; FileNotFoundError.
    """
    if isinstance(source, dict):
        return str(source.get("_name_or_path") or source.get("model_type") or "model"), source
    path = Path(source)
    name, path = (path.resolve().name, path / "config.json") if path.is_dir() else (path.stem, path)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not a whole JSON file: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}, not an object with the model's sizes")
    return name, config


def read_config(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of a ModelSpec (all but its name) from a Hugging Face config. Raises ValueError naming the key."""
    family = _family(config)
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    max_positions = whole("max_position_embeddings", config.get("max_position_embeddings", family.max_positions))
    rope_theta, rope_scaling = read_rope(config, max_positions)
    bias = family.attention_bias == "qkv" or (family.attention_bias == "key" and _flag(config, "attention_bias"))
    return dict(
        hidden=hidden, layers=_size(config, "num_hidden_layers"), heads=heads,
        kv_heads=_kv_heads(config, family, heads), head_dim=_head_dim(config, family, hidden, heads),
        ffn=_size(config, "intermediate_size"),
        vocab=_size(config, "vocab_size"), tied=_flag(config, "tie_word_embeddings"),
        attention_bias=bias, output_bias=bias and family.attention_bias == "key",
        mlp_bias=family.mlp_bias and _flag(config, "mlp_bias"), qk_norm=family.qk_norm,
        norm_eps=number("rms_norm_eps", config.get("rms_norm_eps", 1e-6)), rope_theta=rope_theta,
        rope_scaling=rope_scaling, max_positions=max_positions,
        torch_dtype=config.get("dtype") or config.get("torch_dtype"))


def _family(config: dict[str, Any]) -> _Family:
    """The config's model type, once everything that the model here can't compute has been refused."""
    for keys, what in ((_EXPERTS, "a mixture of experts"), (_LATENT, "multi-head latent attention")):
        for key in keys:
            if config.get(key):
                raise ValueError(f"{key} = {config[key]}: {what} is not supported; {_SUPPORTED}")
    kind = config.get("model_type")
    if kind is None:
        raise ValueError("the config lacks the key 'model_type'")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        raise ValueError(f"model_type = {kind!r} is not supported; {_SUPPORTED}")
    if (act := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ValueError(f"hidden_act = {act!r} is not supported: the feed-forward block gates with 'silu'")
    if window := _window(config, _FAMILIES[kind]):
        raise ValueError(f"{window}: a sliding window is not supported; every layer attends to all tokens before")
    return _FAMILIES[kind]


def _window(config: dict[str, Any], family: _Family) -> str:
    """The keys that put a sliding window to use, with their values; "" where there are none."""
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list):
        raise ValueError(f"layer_types must be a list of words, not {kinds!r}")
    if types := sorted({str(t) for t in kinds} - {"full_attention"}):
        return f"layer_types has {', '.join(types)}"
    window = config.get("sliding_window", 4096)  # the default where the key is left out, of all types that have it
    if family.window and window is not None:
        return f"sliding_window = {window}" + ("" if "sliding_window" in config else " (its default)")
    if not config.get("use_sliding_window") or window is None or kinds:
        return ""
    first = whole("max_window_layers", config.get("max_window_layers", 28), 0)
    if first < _size(config, "num_hidden_layers"):
        return f"use_sliding_window = true, sliding_window = {window}, from layer {first} on"
    return ""


def _size(config: dict[str, Any], key: str) -> int:
    if config.get(key) is None:
        raise ValueError(f"the config lacks the key {key!r}")
    return whole(key, config[key])


def _flag(config: dict[str, Any], key: str) -> bool:
    return flag(key, config.get(key, False))


def _kv_heads(config: dict[str, Any], family: _Family, heads: int) -> int:
    """Left out or null means one KV head per head, but a default that belongs to another size is not taken."""
    key = "num_key_value_heads"
    if key not in config and not family.kv_heads_optional:
        raise ValueError(f"the config lacks the key {key!r}")
    return heads if config.get(key) is None else whole(key, config[key])


def _head_dim(config: dict[str, Any], family: _Family, hidden: int, heads: int) -> int:
    if config.get("head_dim") is not None:
        return whole("head_dim", config["head_dim"])
    if family.head_dim is not None:
        return family.head_dim
    if hidden % heads:
        raise ValueError(f"hidden_size = {hidden} does not divide by num_attention_heads = {heads}: give head_dim")
    return hidden // heads
