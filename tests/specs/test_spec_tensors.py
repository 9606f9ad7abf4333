"""The table of weights: names and shapes of the real models, and how each is cut."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.specs import ModelSpec, TensorSpec, padded
from shardlab.specs.model import GROUPS

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
DENSE = ["llama-2-7b", "llama-2-13b", "llama-2-70b", "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "qwen2.5-0.5b",
         "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b", "qwen2.5-72b", "qwen3-8b",
         "smollm2-135m"]
TINY = {"hidden_size": 48, "intermediate_size": 100, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 101}
VARIANTS = [
    {"model_type": "llama"}, {"model_type": "llama", "tie_word_embeddings": True},
    {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 10},
    {"model_type": "mistral", "sliding_window": None, "head_dim": 20}, {"model_type": "qwen2"},
    {"model_type": "qwen2", "tie_word_embeddings": True}, {"model_type": "qwen3"},
    {"model_type": "qwen3", "attention_bias": True, "head_dim": 8, "tie_word_embeddings": True},
]


def shapes_in_transformers(config):
    """{name: shape} of the weights of the model that transformers builds, nothing allocated."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    return {name.removeprefix("model."): tuple(p.shape) for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", DENSE)
def test_published_models_have_the_weights_that_transformers_gives_them(name):
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    spec, real = ModelSpec.from_config(config), shapes_in_transformers(config)
    assert {t.name: t.shape for t in spec.tensors()} == real
    assert spec.total == sum(map(math.prod, real.values()))


OTHERS = ["gpt2", "gpt-3-175b", "mixtral-8x7b", "qwen3-235b-a22b", "gpt-oss-120b", "deepseek-v3"]


@pytest.mark.parametrize("name", OTHERS)
def test_other_published_models_have_as_many_parameters_as_in_transformers(name):
    """transformers fuses the experts' tensors, so names differ; DeepSeek-V3's 58 × 256 routing biases are buffers."""
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    spec, real = ModelSpec.from_config(config), shapes_in_transformers(config)
    biases = 58 * 256 if name == "deepseek-v3" else 0
    assert spec.total == sum(map(math.prod, real.values())) + biases


def test_every_expert_of_a_layer_is_listed_under_its_own_name():
    spec = ModelSpec.from_config(CONFIGS / "deepseek-v3.json")
    names = {t.name: t.shape for t in spec.layer_tensors(3)}
    assert names["mlp.experts.255.down_proj.weight"] == (7168, 2048)
    assert names["mlp.shared_experts.gate_proj.weight"] == (2048, 7168)
    assert names["self_attn.kv_a_proj_with_mqa.weight"] == (576, 7168)
    assert "mlp.gate_proj.weight" in {t.name for t in spec.layer_tensors(2)}
    assert sum(t.size for t in spec.tensors()) == spec.total == sum(n * t.size for n, t in spec.counted())


def test_active_parameters_are_those_of_the_experts_that_a_token_uses():
    v3 = ModelSpec.from_config(CONFIGS / "deepseek-v3.json")
    one = 3 * 7168 * 2048
    assert v3.total - v3.active == 58 * (256 - 8) * one
    assert v3.active_parameters["shared"] == v3.parameters["shared"] == 58 * one
    dense = ModelSpec.from_config(CONFIGS / "llama-2-7b.json")
    assert dense.active == dense.total


def test_mtp_modules_are_a_layer_and_a_projection_each_and_not_in_the_total():
    v3 = ModelSpec.from_config(CONFIGS / "deepseek-v3.json")
    layer = sum(t.size for t in v3.layer_tensors(60))
    assert v3.mtp_total == layer + 2 * 7168**2 + 3 * 7168
    assert replace(v3, mtp=0).total == v3.total and replace(v3, mtp=0).mtp_total == 0


@pytest.mark.parametrize("keys", VARIANTS, ids=str)
def test_variants_have_the_weights_that_transformers_gives_them(keys):
    config = TINY | keys
    assert {t.name: t.shape for t in ModelSpec.from_config(config).tensors()} == shapes_in_transformers(config)


@pytest.mark.parametrize("keys", VARIANTS, ids=str)
def test_groups_cover_every_tensor_once(keys):
    spec = ModelSpec.from_config(TINY | keys)
    tensors = list(spec.tensors())
    assert len({t.name for t in tensors}) == len(tensors) == sum(times for times, _ in spec.counted())
    assert tuple(spec.parameters) == GROUPS
    assert spec.total == sum(t.size for t in tensors)
    for group in GROUPS:
        assert spec.parameters[group] == sum(t.size for t in tensors if t.group == group)
    assert (spec.parameters["head"] == 0) == spec.tied


def test_each_weight_is_cut_where_megatron_cuts_it():
    spec = ModelSpec.from_config(TINY | {"model_type": "llama", "attention_bias": True, "mlp_bias": True})
    assert {t.name.removeprefix("layers.0."): (t.cut, t.local_shape(4)) for t in spec.tensors() if "layers.1" not in
            t.name and "layers.2" not in t.name} == {
        "embed_tokens.weight": ("vocab", (26, 48)),  # 101 rows padded to 104
        "input_layernorm.weight": ("whole", (48,)),
        "self_attn.q_proj.weight": ("column", (12, 48)),
        "self_attn.q_proj.bias": ("column", (12,)),
        "self_attn.k_proj.weight": ("kv_heads", (12, 48)),  # 2 KV heads on 4 ranks: one whole head each
        "self_attn.k_proj.bias": ("kv_heads", (12,)),
        "self_attn.v_proj.weight": ("kv_heads", (12, 48)),
        "self_attn.v_proj.bias": ("kv_heads", (12,)),
        "self_attn.o_proj.weight": ("row", (48, 12)),
        "self_attn.o_proj.bias": ("whole", (48,)),
        "post_attention_layernorm.weight": ("whole", (48,)),
        "mlp.gate_proj.weight": ("column", (25, 48)),
        "mlp.gate_proj.bias": ("column", (25,)),
        "mlp.up_proj.weight": ("column", (25, 48)),
        "mlp.up_proj.bias": ("column", (25,)),
        "mlp.down_proj.weight": ("row", (48, 25)),
        "mlp.down_proj.bias": ("whole", (48,)),
        "norm.weight": ("whole", (48,)),
        "lm_head.weight": ("vocab", (26, 48)),
    }


def test_embedding_and_head_are_padded_alike():
    """T7: vllm-project/vllm#20843 padded the two to different sizes."""
    for vocab in (1, 2, 100, 101, 102, 103, 151936):
        spec = ModelSpec.from_config(TINY | {"model_type": "llama", "vocab_size": vocab})
        first, last = spec.first_tensors()[0], spec.last_tensors()[-1]
        assert first.name == "embed_tokens.weight"
        assert last.name == "lm_head.weight"
        for p in range(1, 9):
            assert first.local_shape(p) == last.local_shape(p) == (padded(vocab, p) // p, 48)


def test_copies_of_kv_heads():
    tensor = TensorSpec("k_proj.weight", (2 * 16, 64), "attention", "kv_heads", unit=16)
    assert [(tensor.local_shape(p)[0], tensor.copies(p)) for p in (1, 2, 4, 8)] == [(32, 1), (16, 1), (16, 2), (16, 4)]


@settings(deadline=None)
@given(n=st.integers(0, 10**6), p=st.integers(1, 1000))
def test_padded_is_the_least_multiple_that_holds_all(n, p):
    assert padded(n, p) % p == 0
    assert n <= padded(n, p) < n + p


@settings(deadline=None)
@given(n=st.integers(1, 400), p=st.integers(1, 50), cut=st.sampled_from(["column", "row", "vocab", "whole", "shared"]))
def test_the_parts_hold_the_whole(n, p, cut):
    tensor = TensorSpec("weight", (n, n), "mlp", cut)
    held = p * math.prod(tensor.local_shape(p))
    assert tensor.size * tensor.copies(p) <= held
    if n % p == 0:
        assert tensor.size * tensor.copies(p) == held
