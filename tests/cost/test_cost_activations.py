"""The account of activations by hand, and Korthikanti's formula on its published values."""

import time

import pytest

from shardlab.cost.activations import activations, forward_peak
from shardlab.cost.korthikanti import korthikanti, selective_flops
from shardlab.specs import Layout, ModelSpec, find_model

GPT3 = dict(seq=2048, batch=1, hidden=12288, heads=96)
MT_NLG = dict(seq=2048, batch=1, hidden=20480, heads=128)
SPEC = ModelSpec(hidden=32, layers=5, heads=8, kv_heads=4, head_dim=4, ffn=90, vocab=101)


@pytest.mark.parametrize(("mode", "times"), [  # rows B3-gpt3-*
    ("none", 114), ("tp", 23), ("tp_sp", 14.25), ("tp_sel", 13), ("tp_sp_sel", 4.25), ("full", 2)])
def test_korthikanti_on_gpt3(mode, times):
    assert korthikanti(**GPT3, tp=8, mode=mode) == times * 2048 * 12288


def test_korthikanti_published_shares():
    def saving(size):
        return 1 - korthikanti(**size, mode="tp_sp_sel") / korthikanti(**size)

    assert korthikanti(**GPT3) == 2_868_903_936  # B3-gpt3-none-bytes
    assert (korthikanti(**MT_NLG) - korthikanti(**MT_NLG, mode="tp_sel")) / (2048 * 20480) == 64  # B3-mtnlg-5as
    assert saving(GPT3) == pytest.approx(0.70175, rel=1e-3)  # B3-gpt3-sel-save
    assert saving(MT_NLG) == pytest.approx(0.65306, rel=1e-3)  # B3-mtnlg-sel-save


def test_selective_recomputation_costs_a_third_of_what_the_paper_reports():
    counted = selective_flops(2048, 12288)
    assert counted == pytest.approx(0.00901, rel=2e-3)  # B3-gpt3-sel-flops-count
    assert 3 * counted == pytest.approx(0.02703, rel=2e-3)  # B3-gpt3-sel-flops
    assert 3 * selective_flops(2048, 20480) == pytest.approx(0.01639, rel=2e-3)  # B3-mtnlg-sel-flops


def per_token(spec, **keys):
    """What a layer keeps over seq · batch · hidden, as the paper counts."""
    bill = activations(spec, batch=1, seq=2048, dtype="bf16", **keys)
    return bill.per_layer / (2048 * spec.hidden)


def test_where_our_layer_differs_from_the_papers():
    """34 without dropout's 2 masks, without stored scores; the numbers of korthikanti's docstring."""
    gpt3, llama = find_model("gpt-3-175b"), find_model("llama-3.1-70b")
    assert per_token(gpt3, device="cuda") == pytest.approx(34 - 2, abs=0.04)
    assert per_token(llama, device="cuda") == pytest.approx(12.5 + 28, abs=0.04)
    assert per_token(llama) - per_token(llama, device="cuda") == pytest.approx(12, abs=0.01)
    assert korthikanti(8192, 1, 8192, 64) == 354 * 8192 * 8192
    long, short = (activations(llama, batch=1, seq=seq, device="cuda").layers for seq in (8192, 2048))
    assert long == 4 * short


def test_selective_recomputation_has_only_the_log_sum_exp_to_save():
    none, selective, full = (activations(SPEC, batch=2, seq=7, recompute=mode) for mode in (None, "selective", "full"))
    assert none.per_layer - selective.per_layer == 14 * 8 * 4
    assert full.per_layer == 14 * 32 * 4
    assert full.peak < selective.peak == selective.total - selective.loss + selective.logits


def test_a_layer_by_hand():
    """fp32 on a CPU: two norms of 3 tensors and their outputs, q, k, v, out and log-sum-exp, four of the inside."""
    numbers = 2 * (3 * 32 + 1) + (32 + 16 + 16 + 32) + 8 + 4 * 90
    bill = activations(SPEC, batch=2, seq=7)
    assert bill.per_layer == 14 * 4 * numbers
    assert bill.layers == 5 * bill.per_layer
    assert bill.ends == 14 * 8 + 7 * 2 * 4 * 4 + 14 * 4 * (3 * 32 + 1)
    assert bill.loss == 14 * (4 * 101 + 8) + 4
    assert bill.logits == 3 * 14 * 4 * 101
    cut = activations(SPEC, Layout(4), batch=2, seq=7)
    assert cut.per_layer == 14 * 4 * (2 * (3 * 32 + 1) + (8 + 4 + 4 + 8) + 2 + 4 * 23)
    assert "4 ranks" in str(cut) and "no run" not in str(cut)


def test_a_mixture_keeps_what_its_active_experts_do():
    """D-megatron-1784: the config's ffn is right for DeepSeek-V3, whose 9 experts are as wide as its dense block is,
    and half of what Mixtral's two keep."""
    v3, mixtral = find_model("deepseek-v3"), find_model("mixtral-8x7b")
    assert korthikanti(1, 1, v3.hidden, 1, mode="tp_sp_sel", ffn=v3.ffn) / v3.hidden == pytest.approx(28.286, rel=1e-3)
    for spec, share in ((v3, 1), (mixtral, 2)):
        bill = activations(spec, batch=1, seq=64, dtype="bf16")
        inside = sum(t.nbytes for t in bill.kinds[-1][1] if t.what in ("experts", "shared experts"))
        assert inside == share * 64 * 4 * spec.ffn * 2
        assert "no run" in str(bill)
    assert [times for times, _ in activations(v3, batch=1, seq=64).kinds] == [3, 58]


def test_forward_peak_by_hand():
    """Largest in the feed-forward block, in attention, at the logits of all positions."""
    table = 7 * (8 + 2 * 4 * 4)
    assert forward_peak(SPEC, tokens=14, sequences=2, dtype="fp32", logits=2) == 14 * 4 * (3 * 32 + 3 * 90) + table
    narrow = ModelSpec(hidden=32, layers=1, heads=8, kv_heads=4, head_dim=16, ffn=10, vocab=101)
    attention = 2 * 32 + 128 + 64 + 64 + 3 * 128
    assert forward_peak(narrow, tokens=14, dtype="fp32", logits=1) == 14 * 4 * attention + 14 * (8 + 2 * 16 * 4)
    assert forward_peak(find_model("llama-3.1-8b"), tokens=10) == 10 * (4096 + 128256) * 2


@pytest.mark.parametrize(("keys", "message"), [
    (dict(seq=0), "seq must be a whole number of at least 1, not 0"),
    (dict(batch=-1), "batch must be"), (dict(dtype="fp31"), "unknown dtype 'fp31'"),
    (dict(recompute="half"), "recompute must be None, 'selective' or 'full', not 'half'"),
    (dict(device="tpu"), "unknown device 'tpu': use cpu or cuda"),
    (dict(layout=Layout(3)), "tp = 3 does not cut the 8 heads")])
def test_what_cannot_be_accounted_for_is_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        activations(SPEC, **dict(batch=1, seq=1) | keys)


def test_the_formula_refuses_too():
    with pytest.raises(ValueError, match="unknown mode 'sp': use one of none, tp, tp_sp"):
        korthikanti(1, 1, 1, 1, mode="sp")
    with pytest.raises(ValueError, match="tokens must be"):
        forward_peak(SPEC, tokens=0)


def test_the_bill_as_text_and_data():
    bill = activations(SPEC, batch=2, seq=7, recompute="full")
    text, data = str(bill), bill.to_dict()
    assert "full recomputation" in text and "14 tokens × 360 × 4 B" in text
    assert data["peak"] == data["layers"] + data["ends"] + max(data["logits"], data["recomputed"])
    assert {row["label"] for row in data["rows"]} >= {"a layer", "layers", "ends", "loss", "kept", "logits", "at most"}


def test_accounts_are_quick():
    start = time.process_time()
    for _ in range(500):
        assert activations(SPEC, batch=1, seq=9, recompute="full").peak
    assert time.process_time() - start < 0.5
