"""Bytes of the files that models are published in: MTP modules, and what the files hold twice."""

import pytest

from shardlab.cost import checkpoint, memory
from shardlab.specs import ModelSpec, find_model


def test_a_model_without_modules_weighs_in_files_what_it_weighs_in_memory():
    llama = find_model("llama-3.1-70b")
    assert checkpoint(llama) == memory(llama, dtype="bf16").weights
    assert checkpoint(llama, "int4") == memory(llama, dtype="int4").weights


def test_deepseek_v3_has_a_module_and_copies_of_embedding_and_head():
    v3 = find_model("deepseek-v3")
    main, ends = memory(v3, dtype="fp8").weights, 2 * 2 * 129280 * 7168
    module = checkpoint(v3) - main
    assert v3.mtp_total < module < 1.02 * v3.mtp_total, "a byte a parameter; scales, norms, router and eh_proj on top"
    assert checkpoint(v3, copies=1) == main + module + ends == pytest.approx(688.57e9, rel=1e-5)
    assert checkpoint(v3, "bf16") == 2 * (v3.total + v3.mtp_total)


def test_deepseek_v4_as_published():
    v4, v3 = checkpoint(find_model("deepseek-v4-pro")), checkpoint(find_model("deepseek-v3"), copies=1)
    assert v4 == pytest.approx(865e9, rel=0.005), "reported; the compressor and the indexer are left out"
    assert v4 / v3 == pytest.approx(1.2521, rel=0.001)


def test_weights_of_unknown_format_need_one():
    small = ModelSpec(hidden=8, layers=1, heads=2, kv_heads=1, head_dim=4, ffn=16, vocab=10)
    with pytest.raises(ValueError, match="unknown dtype None: use one of"):
        checkpoint(small)
