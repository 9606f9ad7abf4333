"""What the account says is kept is kept, to the byte: plain, recomputed, cut; and what inference holds.

Kinds of models, what is computed again, dtypes: every pair, not all products.
"""

import pytest
import torch
from covering import pairs
from measure import Live, saved_bytes

from shardlab.cost.activations import activations, forward_peak
from shardlab.model import Transformer, attention, transformer
from shardlab.parallel import tensor
from shardlab.specs import Layout, ModelSpec

SIZES = dict(hidden=24, layers=3, heads=12, kv_heads=12, head_dim=4, ffn=90, vocab=101)
BIASES = dict(attention_bias=True, output_bias=True, mlp_bias=True)
CASES = [(1, {}), (1, dict(kv_heads=1, tied=True, qk_norm=True, **BIASES)), (2, dict(kv_heads=2, qk_norm=True)),
         (3, dict(ffn=5, vocab=5, **BIASES)), (4, dict(kv_heads=2, tied=True, qk_norm=True)),
         (1, dict(hidden=96, heads=3, kv_heads=3, head_dim=32, ffn=256, vocab=1000)),
         (4, dict(hidden=50, layers=1, heads=4, kv_heads=4, head_dim=16, ffn=127, vocab=515))]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
BATCH, SEQ = 2, 13


@pytest.fixture
def run(pool):
    """`run(p, fn, *args)`: what `fn(group, *args)` gives on each of p ranks; a single one is this process."""
    return lambda p, fn, *args: pool(p).run(fn, *args) if p > 1 else [fn(None, *args)]


def built(group, spec, dtype, recompute=None, sp=False):
    """A model, cut over the group where there is one, and tokens and labels for it."""
    torch.manual_seed(0)
    model = Transformer(spec, recompute).to(dtype)
    if group is not None:
        model = tensor.cut(model, group, sp)
    return model, *torch.randint(0, spec.vocab, (2, BATCH, SEQ)).unbind()


def kept(group, spec, dtype, recompute, sp=False):
    model, tokens, labels = built(group, spec, dtype, recompute, sp)
    return saved_bytes(model, lambda: model.loss(tokens, labels))[0]


@pytest.mark.parametrize("case,recompute,dtype", pairs(CASES, [None, "selective", "full"], [*DTYPES]))
def test_kept_for_backward(run, case, recompute, dtype):
    p, sizes = case
    spec = ModelSpec(**(SIZES | sizes))
    bill = activations(spec, Layout(tp=p), batch=BATCH, seq=SEQ, dtype=dtype, recompute=recompute)
    assert run(p, kept, spec, DTYPES[dtype], recompute) == [bill.total] * p


@pytest.mark.parametrize("case,sp,recompute,dtype", pairs(
    [case for case in CASES if case[0] > 1], ["keep", "again"], [None, "selective", "full"], [*DTYPES]))
def test_kept_for_backward_of_a_slice(pool, case, sp, recompute, dtype):
    """26 tokens over 2, 3 and 4 ranks: the last two pad them to 27 and 28."""
    p, sizes = case
    spec = ModelSpec(**(SIZES | sizes))
    bill = activations(spec, Layout(p, sp=sp), batch=BATCH, seq=SEQ, dtype=dtype, recompute=recompute)
    assert pool(p).run(kept, spec, DTYPES[dtype], recompute, sp) == [bill.total] * p


def loss_peak(group, spec, dtype):
    model, _, _ = built(group, spec, dtype)
    hidden, labels = torch.zeros(BATCH, 400 * SEQ, spec.hidden, dtype=dtype), torch.arange(BATCH * 400 * SEQ)
    labels = labels.view(BATCH, -1) % spec.vocab
    with Live() as live:
        model.lm_head(hidden, labels).backward()
    return live.peak


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [1, 2, 4])
def test_the_peak_of_the_loss(run, p, dtype):
    spec = ModelSpec(**SIZES | dict(vocab=997))
    bill = activations(spec, Layout(tp=p), batch=BATCH, seq=400 * SEQ, dtype=dtype)
    for measured in run(p, loss_peak, spec, DTYPES[dtype]):
        assert measured == pytest.approx(bill.logits, rel=0.05)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recompute", [None, "selective", "full"])
def test_the_peak_of_a_step_is_at_the_loss(recompute, dtype):
    """Where the vocabulary is large: all that is alive then, gradients of parameters being still to come."""
    spec = ModelSpec(**SIZES | dict(vocab=5000))
    bill = activations(spec, batch=BATCH, seq=SEQ, dtype=dtype, recompute=recompute)
    model, tokens, labels = built(None, spec, DTYPES[dtype], recompute)
    with Live() as live:
        model.loss(tokens, labels).backward()
    assert live.peak == pytest.approx(bill.peak, rel=0.05)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("recompute", "owner", "name"), [
    ("selective", attention, "core"), ("full", transformer.Block, "_forward")])
def test_held_while_computed_again(monkeypatch, recompute, owner, name, dtype):
    spec = ModelSpec(**SIZES)
    bill = activations(spec, batch=BATCH, seq=SEQ, dtype=dtype, recompute=recompute)
    held, computed = [], getattr(owner, name)

    def watched(*args):
        before = live.now
        try:
            return computed(*args)
        finally:
            held.append(live.now - before)

    monkeypatch.setattr(owner, name, watched)
    model, tokens, labels = built(None, spec, DTYPES[dtype], recompute)
    with Live() as live:
        loss = model.loss(tokens, labels)
        held.clear()
        loss.backward()
    assert held == [pytest.approx(bill.recomputed, rel=0.05)] * spec.layers


@torch.no_grad()
def forward_peaks(group, spec, dtype):
    """With all logits and with the last alone: the least of three, since gloo may let go of a tensor late."""
    model, tokens, _ = built(group, spec, dtype)
    peaks = []
    for _ in range(3):
        with Live() as everywhere:
            model(tokens)
        with Live() as last:
            model.lm_head(model.hidden(tokens)[:, -1:])
        peaks.append((everywhere.peak, last.peak))
    return tuple(map(min, zip(*peaks, strict=True)))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("p,sizes", CASES + [(4, dict(ffn=300)), (2, dict(ffn=30, head_dim=16))])
def test_the_peak_of_a_forward_pass(run, p, sizes, dtype):
    spec, size = ModelSpec(**(SIZES | sizes)), dict(tokens=BATCH * SEQ, sequences=BATCH, dtype=dtype)
    everywhere, last = (forward_peak(spec, Layout(tp=p), **size, logits=n) for n in (None, BATCH))
    for measured in run(p, forward_peaks, spec, DTYPES[dtype]):
        assert measured == pytest.approx((everywhere, last), rel=0.1)
