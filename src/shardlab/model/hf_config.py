"""The inverse of `ModelSpec.from_config`: the Hugging Face config.json that says what a spec says."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ..specs import ModelSpec

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def config(spec: ModelSpec, dtype: str) -> dict[str, Any]:
    """A config.json for `spec` and weights stored as `dtype` ("float32"), as `transformers` reads it.

    Raises ValueError where no model type there has the spec's combination of biases and norms.
    """
    kind = _model_type(spec)
    return {
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
    }


def _model_type(spec: ModelSpec) -> str:
    """The model type whose layers have this spec's biases and norms."""
    if spec.beyond_llama:
        raise ValueError(f"{spec.name} has {spec.beyond_llama}: only models of the Llama kind are written")
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
