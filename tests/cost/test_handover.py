"""A cache's way: its bytes as published, when the link keeps up, and what nothing hides."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.cost import fit, handover, kv_handed, kv_per_token, prefill_floor
from shardlab.specs import Layout, LinkSpec, find_card, find_link, find_model

EIGHT, SEVENTY, V3, QWEN, QWEN8 = (find_model(name) for name in (
    "llama-3.1-8b", "llama-3.1-70b", "deepseek-v3", "qwen3-235b-a22b", "qwen3-8b"))
NIC = replace(find_link("ib-ndr"), alpha=None)
GB, GIB, MS = 1e9, 2**30, 1e-3
# Mooncake's documentation, one prefill and one decode instance: tokens, bytes, ms of the transfer, ms to a first token
BIG = [(128, 49e6, 2.07, 129.21), (2048, 789e6, 6.43, 172.05), (8192, 3.15e9, 20.31, 591.14),
       (32768, 12.62e9, 76.78, 3260.14)]
SMALL = [(128, 20 * 2**20, 0.54, 46.09), (2048, 290 * 2**20, 2.51, 85.31), (8192, 1.13 * GIB, 8.84, 212.05),
         (32768, 4.50 * GIB, 31.65, 749.62)]


@pytest.mark.parametrize(("tokens", "nbytes"), [row[:2] for row in BIG])
def test_copies_of_heads_travel_too(tokens, nbytes):
    """Qwen3-235B has 4 KV heads, and on TP8 each is there twice: 385,024 bytes a token, not 192,512."""
    assert (kv_per_token(QWEN), kv_handed(QWEN, 1, Layout(8))) == (192_512, 385_024)
    assert kv_handed(QWEN, tokens, Layout(8)) == pytest.approx(nbytes, rel=0.012)
    assert kv_handed(QWEN, tokens, Layout(4)) == kv_handed(QWEN, tokens) == tokens * 192_512


@pytest.mark.parametrize(("tokens", "nbytes"), [row[:2] for row in SMALL])
def test_the_small_models_table_is_in_gib(tokens, nbytes):
    """147,456 bytes a token, of 16 tokens more than the prompt's; "142.25 GB/s" of it are 152.7."""
    assert kv_handed(QWEN8, 1) == 147_456
    assert kv_handed(QWEN8, tokens + 16) == pytest.approx(nbytes, rel=0.02)
    if tokens == 8192:
        assert kv_handed(QWEN8, 8208) / GIB == pytest.approx(1.127, abs=1e-3)


def test_alpha_and_beta_of_the_published_transfers():
    for spec, layout, more, rows, alpha, beta in ((QWEN, Layout(8), 0, BIG, 1.73, 168.3),
                                                  (QWEN8, None, 16, SMALL, 0.59, 154.4)):
        found = fit([(kv_handed(spec, tokens + more, layout), ms * MS) for tokens, _, ms, _ in rows])
        assert (1000 * found.alpha, found.beta / GB) == (pytest.approx(alpha, rel=0.35), pytest.approx(beta, rel=0.08))
        assert max(map(abs, found.residuals)) < 0.2


def test_transfers_are_a_small_part_of_the_first_tokens_time():
    """1.6 to 3.7% (235B), 4.2% (8B, 32K): at 8,192 tokens 20 ms of 591, and not slower than the prefill."""
    assert [ms / ttft for _, _, ms, ttft in BIG] == pytest.approx([0.016, 0.037, 0.034, 0.024], abs=1e-3)
    assert SMALL[-1][2] / SMALL[-1][3] == pytest.approx(0.042, abs=1e-3)


@pytest.mark.parametrize(("spec", "card", "tp", "peak", "half", "one", "all_", "star"), [
    (SEVENTY, "a100", 8, 0.50, 1.00, 54, 6.7, 2.7), (SEVENTY, "h100", 8, 0.157, 0.31, 54, 6.7, 8.5),
    (EIGHT, "a100", 1, 0.48, 0.96, 21, 21, 1.1), (EIGHT, "h100", 1, 0.15, 0.30, 21, 21, 3.6)])
def test_the_arithmetic_of_disaggregation(spec, card, tp, peak, half, one, all_, star):
    layout = Layout(tp)
    whole, at_half = (prefill_floor(spec, find_card(card), layout, tokens=8192, share=share) for share in (1.0, 0.5))
    assert (whole, at_half) == (pytest.approx(peak, rel=0.03), pytest.approx(half, rel=0.03))
    over_one = handover(spec, 8192, layout, prefill=at_half, link=NIC, ports=1)
    over_all = handover(spec, 8192, layout, prefill=at_half, link=NIC)
    assert 1000 * over_one.seconds == pytest.approx(one, rel=0.03)
    assert 1000 * over_all.seconds == pytest.approx(all_, rel=0.03)
    assert over_one.break_even / GB == pytest.approx(star, rel=0.03)
    assert over_one.break_even == over_all.break_even
    assert whole / over_one.seconds > 2.9  # at the whole peak, over one port: never slower than the prefill


def test_numbers_of_the_derivation():
    assert kv_handed(SEVENTY, 8192) == 327_680 * 8192 == 2.5 * GIB and kv_handed(EIGHT, 8192) == GIB
    slow = handover(SEVENTY, 8192, Layout(8), prefill=0.314, link=find_link("ethernet-10"), ports=1)
    assert slow.seconds == pytest.approx(2.1, rel=0.03) and slow.by_layers > 0.8 * slow.seconds
    hit = handover(SEVENTY, 8192, Layout(8), prefill=0.0314, link=NIC)
    assert hit.break_even == pytest.approx(10 * handover(SEVENTY, 8192, prefill=0.314, link=NIC).break_even)
    narrow = handover(SEVENTY, 8192, Layout(8), prefill=0.314, link=NIC, dtype="int8")
    assert narrow.break_even / 8.537e9 == pytest.approx(0.508, abs=2e-3)


def test_a_latent_is_sent_once():
    assert kv_handed(V3, 99, Layout(8)) == kv_handed(V3, 99) == 99 * kv_per_token(V3)
    assert kv_handed(SEVENTY, 99, Layout(8)) == kv_handed(SEVENTY, 99) == kv_handed(SEVENTY, 99, Layout(16)) / 2


@settings(max_examples=60)
@given(prefill=st.floats(0.001, 10), rate=st.floats(1e8, 1e12), layers=st.integers(1, 200), alpha=st.floats(0, 1e-3))
def test_by_layers_is_what_a_queue_of_layers_leaves(prefill, rate, layers, alpha):
    link = LinkSpec(name="mine", per_direction=rate, alpha=alpha or None)
    found = handover(replace(SEVENTY, layers=layers), 1000, prefill=prefill, link=link)
    free = 0.0
    for layer in range(1, layers + 1):  # each is there after its part of the prefill, and waits for the one before
        free = max(free, prefill * layer / layers) + alpha + found.nbytes / layers / rate
    assert found.by_layers == pytest.approx(free - prefill, rel=1e-6, abs=1e-12)


def test_above_the_break_even_a_layer_is_all_that_shows():
    fast = handover(SEVENTY, 8192, Layout(8), prefill=0.314, link=NIC)
    assert fast.rate > fast.break_even and fast.by_layers / fast.seconds == pytest.approx(1 / 80)
    text = str(fast)
    assert "by layers" in text and "1.2% of it" in text and fast.to_dict()["break_even"] == fast.break_even


def test_what_the_receiver_holds_is_not_sent():
    full, tail = (handover(SEVENTY, 8192, Layout(8), prefill=1, link=NIC, held=held) for held in (0, 6144))
    assert tail.nbytes == full.nbytes // 4
    with pytest.raises(ValueError, match=r"held = 8,192 of 8,192 tokens: the last one at least"):
        handover(SEVENTY, 8192, prefill=1, link=NIC, held=8192)
    with pytest.raises(ValueError, match="prefill must be a number above 0"):
        handover(SEVENTY, 8192, prefill=0, link=NIC)
    with pytest.raises(ValueError, match="ports must be a whole number"):
        handover(SEVENTY, 8192, prefill=1, link=NIC, ports=0)
