"""Floors of time: against hand arithmetic, and what they must not depend on."""

import pytest

from shardlab.cost import memory
from shardlab.cost.time import (
    bound,
    bytes_read,
    decode_floor,
    forward_flops,
    matmul,
    prefill_floor,
    training_flops,
    utilisation,
)
from shardlab.specs import Layout, ModelSpec, find_card, find_model

TINY = ModelSpec(hidden=8, layers=3, heads=2, kv_heads=1, head_dim=4, ffn=16, vocab=11)
WINDOWED = ModelSpec(hidden=8, layers=3, heads=2, kv_heads=1, head_dim=4, ffn=16, vocab=11, window=2, windowed_layers=3)


def test_a_forward_pass_is_two_flops_a_parameter_and_attention_over_half_a_square():
    assert forward_flops(TINY, 5) == 2 * TINY.total * 5 + 2 * 3 * 5**2 * 8
    assert forward_flops(TINY, 5, batch=4) == 4 * forward_flops(TINY, 5)


def test_windows_are_counted_token_by_token():
    """Token i sees min(i, 2) tokens: 1 + 2 + 2 + 2 + 2 of the 15 that it would see without a window."""
    square = forward_flops(TINY, 5) - 2 * TINY.total * 5
    window = forward_flops(WINDOWED, 5) - 2 * WINDOWED.total * 5
    assert window == 3 * (2 * 5 * 2 - 2**2) * (2 * 2 * 4) < square
    assert forward_flops(WINDOWED, 2) == forward_flops(TINY, 2)


def test_a_mixture_computes_with_its_active_parameters():
    """FAULTS 2: DeepSeek-V3's training, by 671e9 parameters, would look 18 times better used than it was."""
    v3 = find_model("deepseek-v3")
    assert forward_flops(v3, 1) - 2 * v3.active == 61 * 128 * (128 + 64 + 128)
    flop = training_flops(37e9, 14.8e12)
    assert utilisation(flop, 2.664e6 * 3600, 1, find_card("h800").flop_rate("bf16")) == pytest.approx(0.346, rel=2e-3)


def test_one_token_reads_every_weight_but_the_embedding_and_its_cache():
    whole = memory(TINY, dtype="bf16")
    assert bytes_read(TINY) == whole.weights - 2 * 11 * 8 + 2 * 3 * 4 * 2
    assert bytes_read(TINY, batch=3, context=10) - bytes_read(TINY, batch=1, context=10) == 2 * 10 * 2 * 3 * 4 * 2
    tied = ModelSpec(hidden=8, layers=3, heads=2, kv_heads=1, head_dim=4, ffn=16, vocab=11, tied=True)
    assert bytes_read(tied) == memory(tied, dtype="bf16").weights + 2 * 3 * 4 * 2  # the head reads all of it


def test_a_batch_touches_more_and_more_experts_and_never_more_than_there_are():
    v3 = find_model("deepseek-v3")
    stored = memory(v3, dtype="fp8").stored
    one = bytes_read(v3, dtype="fp8")
    assert one == pytest.approx(sum(stored.values()) - stored["embedding"] - stored["experts"] * 31 / 32, rel=1e-3)
    reads = [bytes_read(v3, dtype="fp8", batch=b) - b * bytes_read(v3, dtype="fp8") for b in (1, 2, 8, 64)]
    assert reads == sorted(reads, reverse=True)
    everything = sum(stored.values()) - stored["embedding"]
    assert bytes_read(v3, dtype="fp8", batch=1024) <= everything + 1024 * 61 * 576 * 2


def test_floors_are_bytes_over_bandwidth_and_flops_over_rate():
    llama, h100 = find_model("llama-3.1-70b"), find_card("h100")
    assert decode_floor(llama, h100, Layout(8)) == bytes_read(llama, Layout(8)) / h100.hbm
    assert decode_floor(llama, h100, Layout(8), dtype="int4") < decode_floor(llama, h100, Layout(8)) / 3
    assert prefill_floor(llama, h100, Layout(8), tokens=8192) == forward_flops(llama, 8192) / (8 * 989e12)
    assert prefill_floor(llama, h100, tokens=99, share=0.5) == 2 * prefill_floor(llama, h100, tokens=99)
    with pytest.raises(ValueError, match="no arithmetic in 'fp8'"):
        prefill_floor(llama, find_card("a100"), tokens=8192, arithmetic="fp8")


def test_a_share_of_the_peak_is_no_more_than_all_and_a_layout_has_to_fit():
    with pytest.raises(ValueError, match=r"share = 1\.5 is a part of the peak"):
        prefill_floor(TINY, find_card("h100"), tokens=8, share=1.5)
    with pytest.raises(ValueError, match="tp = 3 does not cut"):
        prefill_floor(TINY, find_card("h100"), Layout(3), tokens=8)


def test_what_binds_is_the_longer_of_the_two():
    """FAULTS 12: 0.053 was held to be more than 0.42; the verdict is computed."""
    card = find_card("h100")
    assert bound(card.ridge("bf16") * 1.01, 1.0, card) == "compute"
    assert bound(card.ridge("bf16") * 0.99, 1.0, card) == "memory"


@pytest.mark.parametrize("call", [
    lambda: forward_flops(TINY, 0), lambda: forward_flops(TINY, 5, batch=0), lambda: training_flops(-1, 5),
    lambda: utilisation(1.0, 0.0, 1, 1.0), lambda: bytes_read(TINY, batch=0), lambda: bytes_read(TINY, context=0),
    lambda: prefill_floor(TINY, find_card("h100"), tokens=8, share=0), lambda: bound(-1.0, 1.0, find_card("h100"))])
def test_sizes_that_cannot_be_are_refused(call):
    with pytest.raises(ValueError, match="must be a"):
        call()


def test_a_matrix_product_is_two_flop_a_pair_and_three_matrices():
    """Square of 4096 in bf16: 2 · 4096³ FLOP on 3 · 4096² · 2 B, 4096/3 FLOP a byte."""
    h100 = find_card("h100")
    square = matmul(4096, 4096, 4096, h100)
    assert (square.flop, square.nbytes) == (2 * 4096**3, 3 * 4096**2 * 2)
    assert square.intensity == pytest.approx(4096 / 3)
    assert (square.bound, square.seconds) == ("compute", 2 * 4096**3 / 989e12)
    one = matmul(1, 4096, 14336, h100)
    assert (one.flop, one.nbytes) == (2 * 4096 * 14336, 2 * (4096 + 4096 * 14336 + 14336))
    assert (one.bound, one.seconds) == ("memory", one.nbytes / h100.hbm)
    assert matmul(64, 64, 64, h100, "fp32").nbytes == 3 * 64**2 * 4


def test_a_product_binds_where_its_intensity_meets_the_ridge():
    """Of three equal sides n, intensity is n/3: H100's ridge of 295.2 is met at 886."""
    h100 = find_card("h100")
    assert [matmul(n, n, n, h100).bound for n in (885, 886)] == ["memory", "compute"]
    for m in (1, 100, 295, 400, 5000):
        product = matmul(m, 8192, 8192, h100)
        assert (product.bound == "compute") == (product.intensity >= h100.ridge("bf16"))
        assert product.seconds >= max(product.flop / 989e12, product.nbytes / h100.hbm)


@pytest.mark.parametrize(("call", "message"), [
    (lambda card: matmul(0, 8, 8, card), "m must be a whole number of at least 1, not 0"),
    (lambda card: matmul(8, 8.5, 8, card), "k must be a whole number of at least 1, not 8.5"),
    (lambda card: matmul(8, 8, True, card), "n must be a whole number of at least 1, not True"),
    (lambda card: matmul(8, 8, 8, card, "int4"), "unknown dtype 'int4'"),
    (lambda card: matmul(8, 8, 8, card, "fp64"), "h100 has no arithmetic in 'fp64'"),
])
def test_what_is_no_product_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(find_card("h100"))
