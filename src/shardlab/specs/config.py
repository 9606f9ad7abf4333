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

from .attention import Latent
from .check import flag, number, whole
from .dtype import dtype_of
from .experts import Experts
from .rope import read_rope


@dataclass(frozen=True)
class _Family:
    """What differs between model types: which biases there are, and the defaults of keys left out.

    `attention_bias` is "qkv" (always on q, k, v, never on o) or "key" (on all four if the key `attention_bias` says so)
    or "on" (the same, and on if the key is left out) or None (never). `head_dim` None stands for hidden_size /
    num_attention_heads. `window` is what `sliding_window` defaults to where every layer has it.
    """

    max_positions: int
    attention_bias: str | None = None
    mlp_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    kv_heads_optional: bool = False
    window: int | None = None
    rope_theta: float = 10000.0


_FAMILIES = {
    "llama": _Family(2048, attention_bias="key", mlp_bias=True, kv_heads_optional=True),
    "mistral": _Family(131072, window=4096),
    "qwen2": _Family(32768, attention_bias="qkv"),
    "qwen3": _Family(32768, attention_bias="key", qk_norm=True, head_dim=128),
    "mixtral": _Family(131072, rope_theta=1e6),
    "qwen3_moe": _Family(32768, attention_bias="key", qk_norm=True),
    "deepseek_v3": _Family(4096, attention_bias="key", kv_heads_optional=True),
    "gpt_oss": _Family(131072, attention_bias="on", head_dim=64, rope_theta=150000.0),
}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


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
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a whole JSON file: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}, not an object with the model's sizes")
    return name, config


def read_config(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of a ModelSpec (all but its name) from a Hugging Face config. Raises ValueError naming the key."""
    kind = config.get("model_type")
    if kind is None:
        raise ValueError("the config lacks the key 'model_type'")
    if kind == "gpt2":
        return _read_gpt2(config)
    if not isinstance(kind, str) or kind not in _FAMILIES:
        raise ValueError(f"model_type = {kind!r} is not supported; supported are decoders of model_type "
                         f"{', '.join([*_FAMILIES, 'gpt2'])}")
    if (act := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ValueError(f"hidden_act = {act!r} is not supported: the feed-forward block gates with 'silu'")
    return _read_llama(config, kind, _FAMILIES[kind]) | _read_kind(config, kind)


def _read_llama(config: dict[str, Any], kind: str, family: _Family) -> dict[str, Any]:
    """What all model types but gpt2 say alike."""
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    max_positions = whole("max_position_embeddings", config.get("max_position_embeddings", family.max_positions))
    rope_theta, rope_scaling = read_rope({"rope_theta": family.rope_theta} | config, max_positions)
    bias = {"qkv": True, None: False}.get(family.attention_bias, _flag(config, "attention_bias",
                                                                       family.attention_bias == "on"))
    window, windowed = _window(config, family, _size(config, "num_hidden_layers"))
    eps = number("rms_norm_eps", config.get("rms_norm_eps", 1e-5 if kind in ("mixtral", "gpt_oss") else 1e-6))
    return dict(
        hidden=hidden, layers=_size(config, "num_hidden_layers"), heads=heads,
        kv_heads=_kv_heads(config, family, heads), head_dim=_head_dim(config, family, hidden, heads),
        ffn=_size(config, "intermediate_size"), vocab=_size(config, "vocab_size"),
        tied=_flag(config, "tie_word_embeddings"), attention_bias=bias,
        output_bias=bias and family.attention_bias in ("key", "on"),
        mlp_bias=family.mlp_bias and _flag(config, "mlp_bias"), qk_norm=family.qk_norm, norm_eps=eps,
        rope_theta=rope_theta, rope_scaling=rope_scaling, max_positions=max_positions,
        torch_dtype=_torch_dtype(config), stored=_stored(config), window=window, windowed_layers=windowed)


def _read_kind(config: dict[str, Any], kind: str) -> dict[str, Any]:
    """Experts, latent attention and what else a model type has of its own."""
    if kind == "mixtral":
        return {"experts": Experts(routed=_size(config, "num_local_experts"),
                                   active=_size(config, "num_experts_per_tok"), ffn=_size(config, "intermediate_size"))}
    if kind == "qwen3_moe":
        # the first is what transformers 5.24 writes, the second what Qwen publishes
        count = "num_local_experts" if "num_local_experts" in config else "num_experts"
        return {"experts": Experts(routed=_size(config, count), active=_size(config, "num_experts_per_tok"),
                                   ffn=_size(config, "moe_intermediate_size"), first_dense=_dense_layers(config),
                                   normalised=_flag(config, "norm_topk_prob"))}
    if kind == "deepseek_v3":
        return _read_deepseek(config)
    if kind == "gpt_oss":
        experts = Experts(routed=_size(config, "num_local_experts"), active=_size(config, "num_experts_per_tok"),
                          ffn=_size(config, "intermediate_size"), bias=True)
        return {"experts": experts, "sinks": True}
    for key in _EXPERTS:
        if config.get(key):
            raise ValueError(f"{key} = {config[key]}: model_type {kind!r} has no experts; mixtral, qwen3_moe, "
                             "deepseek_v3 and gpt_oss have")
    return {}


def _read_deepseek(config: dict[str, Any]) -> dict[str, Any]:
    if "q_lora_rank" not in config:
        raise ValueError("the config lacks the key 'q_lora_rank' (null: queries are not compressed)")
    latent = Latent(kv_rank=_size(config, "kv_lora_rank"), rope_dim=_size(config, "qk_rope_head_dim"),
                    nope_dim=_size(config, "qk_nope_head_dim"), value_dim=_size(config, "v_head_dim"),
                    q_rank=None if config["q_lora_rank"] is None else _size(config, "q_lora_rank"),
                    interleaved=_flag(config, "rope_interleave", True))
    experts = Experts(routed=_size(config, "n_routed_experts"), active=_size(config, "num_experts_per_tok"),
                      ffn=_size(config, "moe_intermediate_size"), shared=_size(config, "n_shared_experts", 0),
                      first_dense=_size(config, "first_k_dense_replace", 0), routing_bias=True, score="sigmoid",
                      normalised=_flag(config, "norm_topk_prob", True),
                      scale=number("routed_scaling_factor", config.get("routed_scaling_factor", 2.5)),
                      groups=_size({"n_group": 8} | config, "n_group"),
                      top_groups=_size({"topk_group": 4} | config, "topk_group"))
    mtp = whole("num_nextn_predict_layers", config.get("num_nextn_predict_layers", config.get("num_mtp_layers", 0)), 0)
    return {"latent": latent, "experts": experts, "mtp": mtp, "head_dim": latent.nope_dim + latent.rope_dim}


def _read_gpt2(config: dict[str, Any]) -> dict[str, Any]:
    """GPT-2: learned positions, LayerNorm, biases everywhere, no gate, a tied head."""
    hidden, heads = _size(config, "n_embd"), _size(config, "n_head")
    inner = config.get("n_inner")
    return dict(
        hidden=hidden, layers=_size(config, "n_layer"), heads=heads, kv_heads=heads,
        head_dim=_head_dim(config, _Family(0), hidden, heads),
        ffn=4 * hidden if inner is None else whole("n_inner", inner), vocab=_size(config, "vocab_size"),
        tied=_flag(config, "tie_word_embeddings", True), attention_bias=True, output_bias=True, mlp_bias=True,
        norm_eps=number("layer_norm_epsilon", config.get("layer_norm_epsilon", 1e-5)),
        max_positions=_size(config, "n_positions"), torch_dtype=_torch_dtype(config), stored=_stored(config),
        learned_positions=True, layer_norm=True, gated=False)


def _torch_dtype(config: dict[str, Any]) -> str | None:
    return config.get("dtype") or config.get("torch_dtype")


def _stored(config: dict[str, Any]) -> str | None:
    """The format of the published weights, where the config tells."""
    quantised = config.get("quantization_config")
    if not quantised:
        return dtype_of(_torch_dtype(config)).name if _torch_dtype(config) else None
    method = quantised.get("quant_method") if isinstance(quantised, dict) else None
    if method == "fp8" and quantised.get("weight_block_size") == [128, 128]:
        return "fp8"
    if method == "mxfp4":
        return "mxfp4"
    raise ValueError(f"quantization_config = {quantised} is not known; known are quant_method fp8 with "
                     "weight_block_size [128, 128], and mxfp4: without the key, the model's sizes are read")


def _dense_layers(config: dict[str, Any]) -> int:
    """How many layers come before those with experts: what `mlp_only_layers` and `decoder_sparse_step` say."""
    only, step = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step", 1)
    if not isinstance(only, list):
        raise ValueError(f"mlp_only_layers must be a list of layers, not {only!r}")
    if step != 1:
        raise ValueError(f"decoder_sparse_step = {step} is not supported: experts are in every layer after the first "
                         "dense ones")
    if sorted(only) != list(range(len(only))):
        raise ValueError(f"mlp_only_layers = {only} is not supported: dense layers come first")
    return len(only)


def _window(config: dict[str, Any], family: _Family, layers: int) -> tuple[int | None, int]:
    """(window, how many layers have it), as transformers reads it; (None, 0) where every layer attends to all."""
    kinds = config.get("layer_types")
    if kinds is None and config.get("model_type") == "gpt_oss":
        kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]
    window = config.get("sliding_window", family.window or (128 if config.get("model_type") == "gpt_oss" else 4096))
    if kinds is not None:
        windowed = _windowed(kinds, layers)
    elif config.get("model_type") in ("mistral", "mixtral"):
        windowed = layers if config.get("sliding_window", family.window) is not None else 0
    elif config.get("use_sliding_window") and window is not None:
        windowed = max(0, layers - whole("max_window_layers", config.get("max_window_layers", 28), 0))
    else:
        windowed = 0
    return (whole("sliding_window", window), windowed) if windowed else (None, 0)


def _windowed(kinds: object, layers: int) -> int:
    known = {"full_attention", "sliding_attention"}
    if not isinstance(kinds, list) or len(kinds) != layers or not set(map(str, kinds)) <= known:
        raise ValueError(f"layer_types must name {layers} layers, each {' or '.join(sorted(known))}, not {kinds!r}")
    return kinds.count("sliding_attention")


def _size(config: dict[str, Any], key: str, least: int = 1) -> int:
    if config.get(key) is None:
        raise ValueError(f"the config lacks the key {key!r}")
    return whole(key, config[key], least)


def _flag(config: dict[str, Any], key: str, default: bool = False) -> bool:
    return flag(key, config.get(key, default))


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
