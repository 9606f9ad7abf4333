"""What training and serving hold beside the states: each part against its own account, and how they add up."""

import pytest

from shardlab.cost import activations, forward_peak, kv_cache, memory, serving, training
from shardlab.specs import Layout, find_model

LLAMA = find_model("llama-3.1-70b")
GIB = 2**30


@pytest.mark.parametrize("recompute", [None, "selective", "full"])
@pytest.mark.parametrize("tp", [1, 8])
def test_training_is_states_activations_their_worst_moment_and_a_reserve(tp, recompute):
    bill = training(LLAMA, Layout(tp), batch=2, seq=4096, recompute=recompute, reserve="2 GiB")
    states = memory(LLAMA, Layout(tp), "bf16", training=True, master="fp32")
    kept = activations(LLAMA, Layout(tp), batch=2, seq=4096, dtype="bf16", recompute=recompute, device="cuda")
    assert bill.per_rank == states.per_rank + kept.peak + 2 * GIB
    assert bill.part("activations") == kept.layers + kept.ends
    assert bill.part("logits") + bill.part("a layer again") == kept.peak - kept.layers - kept.ends > 0
    assert bill.states == states.states
    assert sum(row.value for row in bill.rows if row.label[0] != " ") == 2 * bill.per_rank


def test_recomputation_lowers_activations_and_a_cut_lowers_everything():
    modes = (None, "selective", "full")
    kept = [training(LLAMA, batch=1, seq=8192, recompute=mode).part("activations") for mode in modes]
    assert kept[0] > kept[1] > kept[2]
    one, eight = (training(LLAMA, Layout(tp), batch=1, seq=8192) for tp in (1, 8))
    assert one.part("logits") > 4 * eight.part("logits")
    assert one.part("activations") > eight.part("activations") > one.part("activations") / 8  # norms' inputs stay whole


def test_the_logits_peak_is_fp32_over_the_vocabulary():
    bill = training(LLAMA, batch=1, seq=8192)
    assert bill.part("logits") >= 8192 * LLAMA.vocab * 4
    assert "logits" in [row.label for row in bill.rows]


@pytest.mark.parametrize("tp", [1, 8])
def test_serving_is_weights_caches_the_work_on_a_prompt_and_a_reserve(tp):
    bill = serving(LLAMA, Layout(tp), context=8192, concurrency=32, dtype="fp8", kv_dtype="fp8")
    cache = 32 * kv_cache(LLAMA, 8192, Layout(tp), "fp8")
    work = forward_peak(LLAMA, Layout(tp), tokens=2048, sequences=32, logits=32, device="cuda")
    assert (bill.part("KV cache"), bill.part("activations"), bill.part("buffers")) == (cache, work, GIB)
    assert bill.per_rank == memory(LLAMA, Layout(tp), "fp8").weights + cache + work + GIB
    assert bill.host == 0


def test_a_share_of_the_cache_may_lie_with_the_host():
    whole, away = (serving(LLAMA, context=8192, concurrency=8, host_kv=share) for share in (0.0, 0.25))
    cache = 8 * kv_cache(LLAMA, 8192)
    assert away.host == cache // 4 and away.part("KV cache") == cache - away.host
    assert whole.per_rank - away.per_rank == away.host
    assert away.rows[-1].label == "KV cache, host" and away.to_dict()["host"] == away.host


def test_a_larger_chunk_leaves_less_for_caches():
    """SV1: a larger token budget needs more activations: capacity is not a matter of weights alone."""
    small, large = (serving(LLAMA, context=32768, chunk=chunk) for chunk in (2048, 16384))
    assert large.part("activations") > 4 * small.part("activations")
    short = serving(LLAMA, context=100, chunk=2048)
    assert short.part("activations") == forward_peak(LLAMA, tokens=100, sequences=1, dtype="bf16", logits=1)


def test_every_published_model_can_be_priced():
    from shardlab.specs import bundled_models
    for name in bundled_models():
        spec = find_model(name)
        assert serving(spec, context=1024, concurrency=2, dtype=spec.stored).per_rank > 0
        if not spec.compressed:
            assert training(spec, batch=1, seq=512).per_rank > 16 * spec.total
