"""What a Hugging Face config means, and what is refused in it."""

import json
from pathlib import Path

import pytest

from shardlab.specs import ModelSpec, RopeScaling

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
TINY = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 101}
QWEN = TINY | {"model_type": "qwen2", "num_key_value_heads": 2}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}


def test_a_config_of_the_needed_keys_alone_takes_the_documented_defaults():
    assert ModelSpec.from_config(TINY) == ModelSpec(
        name="llama", hidden=64, layers=2, heads=4, kv_heads=4, head_dim=16, ffn=96, vocab=101, tied=False,
        attention_bias=False, output_bias=False, mlp_bias=False, qk_norm=False, norm_eps=1e-6, rope_theta=10000.0,
        rope_scaling=None, max_positions=2048, torch_dtype=None)


def test_every_size_is_read_from_its_own_key():
    spec = ModelSpec.from_config(TINY | {
        "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True,
        "max_position_embeddings": 77, "torch_dtype": "bfloat16"})
    assert spec == ModelSpec(name="llama", hidden=64, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=96, vocab=101,
                             tied=True, norm_eps=1e-5, rope_theta=5e5, max_positions=77, torch_dtype="bfloat16",
                             stored="bf16")


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_defaults_are_those_of_transformers(kind):
    transformers = pytest.importorskip("transformers")
    config = TINY | {"model_type": kind, "num_key_value_heads": 2, "sliding_window": None}
    spec, real = ModelSpec.from_config(config), transformers.AutoConfig.for_model(**config)
    assert (spec.norm_eps, spec.max_positions, spec.tied) == (
        real.rms_norm_eps, real.max_position_embeddings, real.tie_word_embeddings)
    assert spec.rope_theta == real.rope_parameters["rope_theta"]
    assert spec.head_dim == getattr(real, "head_dim", 16)  # qwen2 names none; its model takes hidden / heads
    # what transformers writes, with everything filled in and under its new names, means the same
    assert ModelSpec.from_config(real.to_dict()) == spec


@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                                 "vocab_size", "model_type"])
@pytest.mark.parametrize("null", [False, True])
def test_a_missing_needed_key_is_refused_by_its_name(key, null):
    config = {k: v for k, v in TINY.items() if k != key} | ({key: None} if null else {})
    with pytest.raises(ValueError, match=f"lacks the key '{key}'"):
        ModelSpec.from_config(config)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "mistral"])
def test_kv_heads_are_not_guessed_where_the_default_is_another_models(kind):
    config = TINY | {"model_type": kind, "sliding_window": None}
    with pytest.raises(ValueError, match="lacks the key 'num_key_value_heads'"):
        ModelSpec.from_config(config)
    assert ModelSpec.from_config(config | {"num_key_value_heads": None}).kv_heads == 4


@pytest.mark.parametrize(("kind", "keys", "biases"), [
    ("llama", {}, (False, False, False)),
    ("llama", {"attention_bias": True}, (True, True, False)),
    ("llama", {"mlp_bias": True}, (False, False, True)),
    ("qwen2", {}, (True, False, False)),
    ("qwen2", {"attention_bias": False, "mlp_bias": True}, (True, False, False)),
    ("qwen3", {}, (False, False, False)),
    ("qwen3", {"attention_bias": True}, (True, True, False)),
    ("mistral", {"attention_bias": True, "mlp_bias": True, "sliding_window": None}, (False, False, False)),
])
def test_biases_are_those_of_the_model_type(kind, keys, biases):
    spec = ModelSpec.from_config(QWEN | {"model_type": kind} | keys)
    assert (spec.attention_bias, spec.output_bias, spec.mlp_bias) == biases
    assert spec.qk_norm == (kind == "qwen3")


def test_qwen3_has_its_own_default_of_head_dim():
    assert ModelSpec.from_config(QWEN | {"model_type": "qwen3"}).head_dim == 128
    assert ModelSpec.from_config(QWEN | {"model_type": "qwen3", "head_dim": 32}).head_dim == 32


@pytest.mark.parametrize(("keys", "message"), [
    ({"num_local_experts": 8}, "num_local_experts = 8: model_type 'llama' has no experts; mixtral, qwen3_moe"),
    ({"model_type": "mamba"}, "model_type = 'mamba' is not supported; supported are .* llama, mistral, qwen2, qwen3"),
    ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "'awq'.* is not known; known are quant_method fp8"),
    ({"torch_dtype": "float7"}, "unknown dtype 'float7'"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported: .* 'silu'"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not supported: use one"),
    ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_type 'longrope' is not supported"),
    ({"rope_scaling": {"type": "linear"}}, "rope_type 'linear' needs the key 'factor'"),
    ({"rope_scaling": {"type": "yarn"}}, "rope_type 'yarn' needs the key 'factor'"),
    ({"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}}, "needs the key 'low_freq_factor'"),
    ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor = 4.0 must be below high_freq_factor = 4.0"),
    ({"rope_scaling": LLAMA3 | {"factor": "8"}}, "factor must be a number above 0, not '8'"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ by layer type .full_attention."),
    ({"rope_scaling": "llama3"}, "objects with a rope_type, not 'llama3'"),
    ({"layer_types": ["full_attention"]}, "layer_types must name 2 layers, each full_attention or sliding_attention"),
    ({"layer_types": ["full_attention", "chunked"]}, "layer_types must name 2 layers"),
    ({"hidden_size": -64}, "hidden_size must be a whole number of at least 1, not -64"),
    ({"vocab_size": 0}, "vocab_size must be a whole number of at least 1, not 0"),
    ({"num_hidden_layers": True}, "num_hidden_layers must be a whole number of at least 1, not True"),
    ({"intermediate_size": 96.0}, "intermediate_size must be a whole number of at least 1, not 96.0"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, not 1"),
    ({"rms_norm_eps": 0}, "rms_norm_eps must be a number above 0, not 0"),
    ({"rope_theta": float("inf")}, "rope_theta must be a number above 0, not inf"),
    ({"hidden_size": 66}, "hidden_size = 66 does not divide by num_attention_heads = 4: give head_dim"),
    ({"num_key_value_heads": 3}, "3 KV heads don't divide 4 heads"),
    ({"head_dim": 15}, "head_dim = 15 must be even"),
])
def test_what_is_not_supported_is_refused_with_its_key_and_value(keys, message):
    with pytest.raises(ValueError, match=message):
        ModelSpec.from_config(TINY | keys)


@pytest.mark.parametrize(("keys", "window"), [
    ({"model_type": "mistral"}, (4096, 2)),
    ({"model_type": "mistral", "sliding_window": 512}, (512, 2)),
    ({"model_type": "mistral", "sliding_window": None}, (None, 0)),
    ({"sliding_window": 512}, (None, 0)),
    ({"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 1}, (512, 1)),
    ({"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 2}, (None, 0)),
    ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 1}, (None, 0)),
    ({"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 1, "layer_types": ["full_attention"] * 2},
     (None, 0)),
    ({"sliding_window": 512, "layer_types": ["full_attention", "sliding_attention"]}, (512, 1)),
])
def test_a_window_is_read_where_it_is_in_use(keys, window):
    spec = ModelSpec.from_config(QWEN | keys)
    assert (spec.window, spec.windowed_layers) == window


EXPERTS = {"mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
           "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
           "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
           "deepseek_v3": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                           "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 12, "kv_lora_rank": 10,
                           "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8, "n_group": 2,
                           "topk_group": 1}}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 101}


@pytest.mark.parametrize(("kind", "key"), [(kind, key) for kind, keys in EXPERTS.items() for key in keys
                                           if not key.endswith("group")])
@pytest.mark.parametrize("null", [False, True])
def test_a_missing_size_of_experts_or_latent_attention_is_refused_by_its_name(kind, key, null):
    config = QWEN | EXPERTS[kind] | {"model_type": kind}
    assert ModelSpec.from_config(config).experts.routed == 4
    broken = {k: v for k, v in config.items() if k != key} | ({key: None} if null else {})
    if null and key == "q_lora_rank":  # null means that queries are not compressed
        assert ModelSpec.from_config(broken).latent.q_rank is None
        return
    with pytest.raises(ValueError, match=f"lacks the key '{key}'"):
        ModelSpec.from_config(broken)


@pytest.mark.parametrize("key", [key for key in GPT2 if key != "model_type"])
def test_a_missing_size_of_gpt2_is_refused_by_its_name(key):
    assert ModelSpec.from_config(GPT2).ffn == 256
    with pytest.raises(ValueError, match=f"lacks the key '{key}'"):
        ModelSpec.from_config({k: v for k, v in GPT2.items() if k != key})


@pytest.mark.parametrize(("kind", "keys", "message"), [
    ("mixtral", {"num_experts_per_tok": 5}, "5 active experts of 4: a token can't use more than there are"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2 is not supported"),
    ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers = \[1\] is not supported: dense layers come first"),
    ("deepseek_v3", {"first_k_dense_replace": 3}, "first_dense = 3 are more than the model's 2 layers"),
    ("deepseek_v3", {"kv_lora_rank": -1}, "kv_lora_rank must be a whole number of at least 1, not -1"),
    ("deepseek_v3", {"n_shared_experts": 0.5}, "n_shared_experts must be a whole number of at least 0, not 0.5"),
    ("gpt_oss", {"sliding_window": 0}, "sliding_window must be a whole number of at least 1, not 0"),
])
def test_experts_that_cannot_be_are_refused(kind, keys, message):
    with pytest.raises(ValueError, match=message):
        ModelSpec.from_config(QWEN | EXPERTS[kind] | {"model_type": kind} | keys)


@pytest.mark.parametrize(("keys", "stored"), [
    ({}, None), ({"torch_dtype": "bfloat16"}, "bf16"), ({"dtype": "float32"}, "fp32"),
    ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "fp8"),
    ({"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
])
def test_the_format_of_the_published_weights_is_read(keys, stored):
    assert ModelSpec.from_config(TINY | keys).stored == stored


@pytest.mark.parametrize("kind", ["gpt_oss", "gpt2", "mistral"])
def test_what_the_plain_model_does_not_compute_is_refused_by_its_name(kind):
    from shardlab.model import Transformer
    config = GPT2 if kind == "gpt2" else QWEN | EXPERTS.get(kind, {}) | {"model_type": kind}
    words = {"gpt2": "learned positions, LayerNorm, a feed-forward block without a gate", "mistral": "a sliding window",
             "gpt_oss": "experts with biases, a sliding window, attention sinks"}
    with pytest.raises(ValueError, match=f"has {words[kind]}: the plain model computes no such layers"):
        Transformer(ModelSpec.from_config(config))


@pytest.mark.parametrize("keys", [
    {"rope_theta": 5e5, "rope_scaling": LLAMA3},
    {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
    {"rope_theta": 5e5, "rope_scaling": {"type": "llama3"} | {k: v for k, v in LLAMA3.items() if k != "rope_type"}},
])
def test_rope_reads_the_same_from_old_and_new_keys(keys):
    spec = ModelSpec.from_config(TINY | keys)
    assert spec.rope_theta == 5e5
    assert spec.rope_scaling == RopeScaling("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)


def test_yarn_takes_its_defaults_from_the_context():
    yarn = ModelSpec.from_config(TINY | {"max_position_embeddings": 512, "rope_scaling": {
        "type": "yarn", "factor": None, "original_max_position_embeddings": 128, "mscale": 1.0}})
    assert yarn.rope_scaling == RopeScaling("yarn", 4.0, 128, beta_fast=32, beta_slow=1, mscale=1.0)
    whole = ModelSpec.from_config(TINY | {"rope_scaling": {"type": "yarn", "factor": 2.0}})
    assert whole.rope_scaling.original_max_position_embeddings == 2048
    outside = ModelSpec.from_config(TINY | {"original_max_position_embeddings": 64,
                                            "rope_scaling": {"type": "yarn", "factor": 2.0}})
    assert outside.rope_scaling.original_max_position_embeddings == 64


def test_linear_scaling_and_default_rope():
    assert ModelSpec.from_config(TINY | {"rope_scaling": {"type": "linear", "factor": 4}}).rope_scaling == (
        RopeScaling("linear", 4))
    default = ModelSpec.from_config(TINY | {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}})
    assert (default.rope_theta, default.rope_scaling) == (7.0, None)


def test_a_config_is_found_in_a_folder_and_named_after_it(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    assert ModelSpec.from_config(folder).name == "my-model"
    assert ModelSpec.from_config(str(folder / "config.json")).name == "config"
    assert ModelSpec.from_config(CONFIGS / "llama-2-7b.json").name == "llama-2-7b"


def test_a_broken_file_is_refused_with_the_place(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(TINY)[:40])
    with pytest.raises(ValueError, match=r"config\.json is not a whole JSON file: .*line 1 column"):
        ModelSpec.from_config(file)
    file.write_text("[1, 2]")
    with pytest.raises(ValueError, match="holds a list, not an object"):
        ModelSpec.from_config(file)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        ModelSpec.from_config(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        (tmp_path / "empty").mkdir()
        ModelSpec.from_config(tmp_path / "empty")


@pytest.mark.parametrize(("change", "message"), [
    ({"hidden": -1}, "hidden must be a whole number"), ({"layers": True}, "layers must be"),
    ({"tied": 1}, "tied must be true or false"), ({"kv_heads": 3}, "3 KV heads don't divide 4 heads"),
    ({"kv_heads": 8}, "8 KV heads don't divide 4 heads"), ({"norm_eps": -1.0}, "norm_eps must be a number above 0"),
])
def test_a_spec_made_by_hand_is_checked_too(change, message):
    sizes = dict(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=101)
    assert ModelSpec(**sizes).total > 0
    with pytest.raises(ValueError, match=message):
        ModelSpec(**sizes | change)


@pytest.mark.parametrize("changes", [
    {"model_type": []}, {"model_type": {}}, {"layer_types": -1}, {"layer_types": True},
    {"use_sliding_window": True, "max_window_layers": None}, {"use_sliding_window": True, "max_window_layers": "8"},
    {"use_sliding_window": True, "num_hidden_layers": []}])
def test_values_of_another_kind_are_refused_as_values(changes):
    with pytest.raises(ValueError, match=next(reversed(changes))):
        ModelSpec.from_config(QWEN | changes)


@pytest.mark.parametrize("changes,said", [({"rope_theta": 1.0}, "rope_theta = 1 must be above 1"),
                                          ({"rope_scaling": {"kind": "yarn"}}, "RopeScaling or None")])
def test_a_spec_without_frequencies_is_refused(changes, said):
    sizes = {"hidden": 64, "layers": 1, "heads": 4, "kv_heads": 4, "head_dim": 16, "ffn": 96, "vocab": 101}
    with pytest.raises(ValueError, match=said):
        ModelSpec(**sizes | changes)


def test_of_latent_attention_only_what_rope_turns_has_to_be_even():
    config = QWEN | EXPERTS["deepseek_v3"] | {"model_type": "deepseek_v3"}
    assert ModelSpec.from_config(config | {"qk_nope_head_dim": 7}).head_dim == 11
    with pytest.raises(ValueError, match="rope_dim = 3 must be even"):
        ModelSpec.from_config(config | {"qk_rope_head_dim": 3})
