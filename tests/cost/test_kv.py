"""The KV cache of every kind of attention, against hand arithmetic; what fits."""

from pathlib import Path

import pytest

from shardlab.cost import kv_cache, kv_per_token, requests_that_fit
from shardlab.specs import Layout, ModelSpec, find_model

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
SIZES = dict(hidden=64, layers=6, heads=8, kv_heads=4, head_dim=128, ffn=90, vocab=101)
GIB = 2**30


def test_grouped_queries_count_kv_heads():
    """SV8: an estimate from hidden_size is 4 and 8 times too high; SV10: below one head a rank nothing is saved."""
    eight, seventy = (ModelSpec.from_config(CONFIGS / f"llama-3.1-{n}.json") for n in ("8b", "70b"))
    assert (kv_per_token(eight), kv_per_token(seventy)) == (131_072, 327_680)
    assert [kv_per_token(seventy, Layout(tp)) for tp in (2, 8, 16, 64)] == [163_840, 40_960, 40_960, 40_960]
    assert (kv_per_token(eight, dtype="fp32"), kv_per_token(eight, dtype="fp8")) == (262_144, 65_536)


def test_kv_heads_that_do_not_fit_are_refused():
    """SV10: 4 KV heads leave 64 of 512 columns on TP 8, half a head, which crashes in mid-forward: copied here."""
    four = ModelSpec(**SIZES)
    assert kv_per_token(four, Layout(8)) == 6 * 2 * 1 * 128 * 2
    with pytest.raises(ValueError, match="tp can be 1, 2, 4, 8"):
        kv_per_token(four, Layout(6))


def test_a_latent_is_kept_once_and_whole_on_every_rank():
    v3 = find_model("deepseek-v3")
    assert kv_per_token(v3) == 61 * (512 + 64) * 2 == kv_per_token(v3, Layout(tp=8))
    assert kv_per_token(v3, dtype="fp8") == 61 * (512 + 4 * 4 + 64 * 2)


def test_windowed_layers_stop_growing():
    oss = find_model("gpt-oss-120b")
    layer = 2 * 8 * 64 * 2
    assert kv_per_token(oss) == 18 * layer
    assert kv_cache(oss, 100) == 36 * layer * 100
    assert kv_cache(oss, 131_072) == 18 * layer * (131_072 + 128) == kv_cache(oss, 131_073) - 18 * layer


def test_compressed_entries_are_shared_by_several_tokens():
    v4 = find_model("deepseek-v4-pro")
    assert kv_per_token(v4) == 30 / 4 * (584 + 68) + 31 / 128 * 584
    assert kv_cache(v4, 256) == 30 * 64 * 652 + 31 * 2 * 584
    assert kv_cache(v4, 127) == 30 * 31 * 652


@pytest.mark.parametrize("name", ["llama-3.1-70b", "deepseek-v3", "gpt-oss-120b"])
@pytest.mark.parametrize("tokens", [1, 128, 8192])
def test_a_request_grows_by_the_token_once_windows_are_full(name, tokens):
    spec = find_model(name)
    more = kv_cache(spec, tokens + 200) - kv_cache(spec, tokens + 199)
    assert more == kv_per_token(spec)
    assert kv_cache(spec, tokens) >= tokens * kv_per_token(spec)


def test_tokens_are_requests_times_their_length_for_a_uniform_model():
    """SV4: a log said 290,864 tokens and 33.04 requests of 32,768: the two must agree, or be counted by request."""
    spec = find_model("llama-3.1-8b")
    free = 40 * GIB
    fit = requests_that_fit(free, spec, 32_768)
    assert fit == 10 and fit * 32_768 * kv_per_token(spec) <= free < (fit + 1) * 32_768 * kv_per_token(spec)
    hybrid = find_model("gpt-oss-120b")
    assert requests_that_fit(free, hybrid, 32_768) == free // kv_cache(hybrid, 32_768) > free // (
        36 * 2 * 8 * 64 * 2 * 32_768)


def test_what_does_not_fit_is_none():
    spec = find_model("llama-3.1-70b")
    assert requests_that_fit(0, spec, 8192) == requests_that_fit(-5 * GIB, spec, 8192) == 0
    assert requests_that_fit(GIB, spec, 8192) == 0
    assert requests_that_fit(GIB, spec, 8192, Layout(tp=8)) == 3


@pytest.mark.parametrize(("call", "message"), [
    (lambda spec: kv_per_token(spec, dtype="fp5"), "unknown dtype 'fp5': use one of .*, or fp8"),
    (lambda spec: kv_cache(spec, 0), "tokens must be a whole number of at least 1, not 0"),
    (lambda spec: kv_cache(spec, 2.5), "tokens must be a whole number"),
])
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(find_model("llama-3.1-8b"))
