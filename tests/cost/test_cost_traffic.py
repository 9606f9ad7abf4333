"""Collectives of one step, against hand arithmetic. The run confirms them in tests/parity."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.cost import traffic
from shardlab.specs import Layout, ModelSpec, padded

SIZES = dict(hidden=32, layers=3, heads=4, kv_heads=4, head_dim=8, ffn=90, vocab=101)
SPEC = ModelSpec(**SIZES)


def calls(bill):
    return Counter({(c.op, c.phase, c.what): (c.count, c.payload, c.ranks) for c in bill.collectives})


def test_a_training_step_by_hand():
    n = 2 * 5 * 32 * 4
    assert calls(traffic(SPEC, Layout(4), batch=2, seq=5)) == {
        ("all_reduce", "forward", "embedding"): (1, n, 4),
        ("all_reduce", "forward", "attention out"): (3, n, 4),
        ("all_reduce", "forward", "mlp out"): (3, n, 4),
        ("all_reduce", "forward", "loss, largest logit"): (1, 10 * 4, 4),
        ("all_reduce", "forward", "loss, sum and target"): (1, 2 * 10 * 4, 4),
        ("all_reduce", "backward", "head in"): (1, n, 4),
        ("all_reduce", "backward", "mlp in"): (3, n, 4),
        ("all_reduce", "backward", "attention in"): (3, n, 4),
    }


def test_a_token_of_generation_by_hand():
    """101 logits are padded to 104: each of 4 ranks hands 26 to the all-gather."""
    assert calls(traffic(SPEC, Layout(4), batch=1, seq=1, dtype="bf16", backward=False, head="logits")) == {
        ("all_reduce", "forward", "embedding"): (1, 64, 4),
        ("all_reduce", "forward", "attention out"): (3, 64, 4),
        ("all_reduce", "forward", "mlp out"): (3, 64, 4),
        ("all_gather", "forward", "logits"): (1, 26 * 2, 4),
    }


@pytest.mark.parametrize(("dtype", "width"), [("fp32", 4), ("bf16", 4), ("fp16", 4), ("fp64", 8)])
def test_the_loss_is_taken_in_fp32_at_least(dtype, width):
    bill = traffic(SPEC, Layout(2), batch=1, seq=7, dtype=dtype, backward=False)
    assert [c.payload for c in bill.collectives if "loss" in c.what] == [7 * width, 2 * 7 * width]


def test_copied_heads_and_their_norms_are_summed_after_backward():
    spec = ModelSpec(**SIZES | dict(kv_heads=2), attention_bias=True, qk_norm=True)
    bill = traffic(spec, Layout(4), batch=1, seq=1)
    names = "self_attn.k_proj, self_attn.k_proj.bias, self_attn.v_proj, self_attn.v_proj.bias"
    assert {c.what: (c.count, c.payload, c.ranks) for c in bill.where(phase="finish")} == {
        names: (1, 3 * 2 * (8 * 32 + 8) * 4, 2), "self_attn.q_norm, self_attn.k_norm": (1, 3 * 2 * 8 * 4, 4)}
    assert {c.what for c in traffic(spec, Layout(2), 1, 1).where(phase="finish")} == {
        "self_attn.q_norm, self_attn.k_norm"}
    one = replace(spec, kv_heads=1)  # all ranks hold it, as they do the norms
    assert [(c.payload, c.ranks) for c in traffic(one, Layout(4), 1, 1).where(phase="finish")] == [
        (3 * 2 * (8 * 32 + 8 + 8) * 4, 4)]
    assert traffic(spec, Layout(4), 1, 1, backward=False).count(phase="finish") == 0


@settings(deadline=None)
@given(layers=st.integers(1, 100), batch=st.integers(1, 9), seq=st.integers(1, 99), tp=st.sampled_from([1, 2, 4]),
       vocab=st.integers(1, 999), head=st.sampled_from(["loss", "logits"]), backward=st.booleans())
def test_two_all_reduces_a_layer_forward_and_two_backward(layers, batch, seq, tp, vocab, head, backward):
    spec = ModelSpec(**SIZES | dict(layers=layers, vocab=vocab))
    bill = traffic(spec, Layout(tp), batch, seq, head=head, backward=backward)
    if tp == 1:
        assert bill.collectives == ()
        assert bill.count() == bill.total() == bill.wire() == bill.hops() == 0
        return
    n = batch * seq * 32 * 4
    ends = 3 if head == "loss" else 1
    assert bill.count("all_reduce", "forward") == 2 * layers + ends
    assert bill.count(phase="backward") == (2 * layers + 1) * backward
    logits = batch * seq * padded(vocab, tp) // tp * 4
    assert bill.total("all_gather") == logits * (head == "logits")
    assert bill.total(phase="forward") == (2 * layers + 1) * n + (logits if head == "logits" else 3 * batch * seq * 4)
    assert bill.total(phase="backward") == (2 * layers + 1) * n * backward
    assert bill.total() == sum(bill.total(phase=phase) for phase in ("forward", "backward", "finish"))
    assert bill.wire("all_reduce") == pytest.approx(2 * (tp - 1) / tp * bill.total("all_reduce"))


def test_each_call_is_sent_round_a_ring():
    bill = traffic(SPEC, Layout(4), batch=1, seq=1, dtype="bf16", backward=False, head="logits")
    assert {(c.op, c.payload, c.wire, c.hops) for c in bill.collectives} == {
        ("all_reduce", 64, 96, 6), ("all_gather", 52, 156, 3)}


@pytest.mark.parametrize(("keys", "message"), [
    (dict(layout=Layout(3)), "tp = 3 does not cut the 4 heads"), (dict(batch=0), "batch must be a whole number"),
    (dict(seq=True), "seq must be a whole number"), (dict(dtype="int3"), "unknown dtype 'int3'"),
    (dict(head="sampled"), "unknown head 'sampled': use loss or logits"),
])
def test_what_cannot_be_billed_is_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        traffic(**dict(spec=SPEC, layout=Layout(2), batch=1, seq=1) | keys)
