"""The inverse of `ModelSpec.from_config`: the Hugging Face config.json that says what a spec says, and the names that
its model type stores weights under."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ..specs import ModelSpec

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
                  "mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
                  "deepseek_v3": "DeepseekV3ForCausalLM"}
_OF_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def config(spec: ModelSpec, dtype: str) -> dict[str, Any]:
    """A config.json for `spec` and weights stored as `dtype` ("float32"), as `transformers` reads it.

    MTP modules are left out, as the plain model leaves them out. Raises ValueError where no model type there has the
    spec's combination of layers, biases and norms.
    """
    if spec.beyond_plain:
        raise ValueError(f"{spec.name} has {spec.beyond_plain}: only models that the plain model computes are written")
    kind = _mixture_type(spec) or _model_type(spec)
    written = {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        "hidden_act": "silu",
        "hidden_size": spec.hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.ffn,
        "vocab_size": spec.vocab,
        "tie_word_embeddings": spec.tied,
        "attention_bias": spec.attention_bias,
        "mlp_bias": spec.mlp_bias,
        "rms_norm_eps": spec.norm_eps,
        "max_position_embeddings": spec.max_positions,
        "rope_theta": spec.rope_theta,
        "rope_scaling": _rope_scaling(spec),
        "torch_dtype": dtype,
        **_mixture(spec, kind),
    }
    _same(spec, written)
    return written


def stored_name(spec: ModelSpec, name: str) -> str:
    """The name in a Hugging Face folder of the weight that the plain model calls `name`."""
    if name.startswith("lm_head."):
        return name
    before, inside, after = name.partition(".mlp.")
    if inside and _mixture_type(spec) == "mixtral":
        block, *rest = after.split(".")  # experts.0.gate_proj.weight, or gate.weight
        return ".".join(["model", before, "block_sparse_moe", block, *(_OF_MIXTRAL.get(part, part) for part in rest)])
    return f"model.{name}"


def _mixture_type(spec: ModelSpec) -> str | None:
    """The model type with latent attention, or with experts and the spec's norms; None where it has neither."""
    if spec.latent:
        return "deepseek_v3"
    return None if spec.experts is None else "qwen3_moe" if spec.qk_norm else "mixtral"


def _mixture(spec: ModelSpec, kind: str) -> dict[str, Any]:
    """What a model type with experts, or with latent attention, says besides."""
    experts, latent = spec.experts, spec.latent
    if experts is None and latent is None:
        return {}
    if experts is None:
        raise ValueError(f"{spec.name} has latent attention and no experts, which no Hugging Face model type has: give "
                         "it experts with first_dense = layers, and no layer will have any")
    if latent is None and kind == "mixtral":
        return {"num_local_experts": experts.routed, "num_experts_per_tok": experts.active, "sliding_window": None,
                "intermediate_size": experts.ffn}
    if latent is None:
        return {"num_experts": experts.routed, "num_experts_per_tok": experts.active, "decoder_sparse_step": 1,
                "moe_intermediate_size": experts.ffn, "norm_topk_prob": experts.normalised,
                "mlp_only_layers": list(range(experts.first_dense))}
    return {"n_routed_experts": experts.routed, "num_experts_per_tok": experts.active, "n_group": experts.groups,
            "topk_group": experts.top_groups, "moe_intermediate_size": experts.ffn, "n_shared_experts": experts.shared,
            "first_k_dense_replace": experts.first_dense, "norm_topk_prob": experts.normalised,
            "routed_scaling_factor": experts.scale, "num_nextn_predict_layers": 0,
            "q_lora_rank": latent.q_rank, "kv_lora_rank": latent.kv_rank, "qk_rope_head_dim": latent.rope_dim,
            "qk_nope_head_dim": latent.nope_dim, "v_head_dim": latent.value_dim, "rope_interleave": latent.interleaved,
            "num_key_value_heads": spec.heads, "head_dim": latent.rope_dim}  # what transformers turns by RoPE


def _same(spec: ModelSpec, written: dict[str, Any]) -> None:
    """Raise ValueError where a model of that type has not the spec's layers."""
    unread = {"name", "torch_dtype", "stored", "mtp"} | ({"kv_heads", "head_dim"} if spec.latent else set())
    unread |= {"ffn"} if spec.experts and spec.experts.first_dense == 0 else set()  # of no layer
    ours, theirs = (_fields(each) for each in (spec, ModelSpec.from_config(written)))
    differ = [f"{name} = {ours[name]!r}" for name in ours if name not in unread and ours[name] != theirs.get(name)]
    if differ:
        raise ValueError(f"no Hugging Face model type has the layers of {spec.name}: a {written['model_type']} has not "
                         f"{', '.join(differ)}")


def _fields(spec: ModelSpec) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in asdict(spec).items():
        out |= {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
    return out


def _model_type(spec: ModelSpec) -> str:
    """The model type whose layers have this spec's biases and norms."""
    biases = (spec.attention_bias, spec.output_bias)
    if spec.qk_norm and not spec.mlp_bias and biases in ((False, False), (True, True)):
        return "qwen3"
    if not spec.qk_norm and biases in ((False, False), (True, True)):
        return "llama"
    if not spec.qk_norm and not spec.mlp_bias and biases == (True, False):
        return "qwen2"
    raise ValueError(
        f"no Hugging Face model type has attention_bias={spec.attention_bias}, output_bias={spec.output_bias}, "
        f"mlp_bias={spec.mlp_bias} and qk_norm={spec.qk_norm} together: llama has both attention biases or none, "
        "qwen2 the first only, qwen3 both or none and qk_norm; mlp_bias is llama's"
    )


def _rope_scaling(spec: ModelSpec) -> dict[str, Any] | None:
    if spec.rope_scaling is None:
        return None
    fields = {name: value for name, value in asdict(spec.rope_scaling).items() if value is not None}
    return {"rope_type": fields.pop("kind"), **fields}
