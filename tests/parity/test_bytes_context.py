"""The bytes of the context axis, predicted and counted: keys and values that go round, and their gradients."""

from collections import Counter

import pytest
import torch

from shardlab import comm
from shardlab.cost import traffic
from shardlab.model.transformer import Transformer
from shardlab.parallel import context, data, grads, mesh, tensor
from shardlab.specs import Latent, Layout, ModelSpec, dtype_of

SIZES = dict(hidden=24, layers=3, heads=12, kv_heads=4, head_dim=4, ffn=18, vocab=31)
LATENT = dict(latent=Latent(kv_rank=10, rope_dim=4, nope_dim=6, value_dim=8, q_rank=14), kv_heads=12)
BUCKET = 6_000


def step(_group, spec, layout, seq, dtype, frozen=(), recompute=None, use=None):
    """A training step and a forward pass, recorded; replicas have the same tokens, which changes no size."""
    groups = mesh.build(outer=layout.dp, cp=layout.cp, tp=layout.tp)
    everyone = mesh.build(dp=layout.data_ranks, inner=layout.tp).get_group("dp")
    model = Transformer(spec, recompute).to(getattr(torch, dtype_of(dtype).torch))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(f"{name}.".startswith(f"{each}.") for each in frozen))
    tokens = torch.arange(2 * seq).view(2, seq) % spec.vocab
    with comm.record() as train, comm.use(**use or {}):
        tensor.cut(model, groups.get_group("tp"), layout.sp)
        context.cut(model, groups.get_group("cp"))
        data.replicate(model, everyone, BUCKET)
        model.loss(tokens, tokens.roll(-1, 1), 100).backward()
        grads.finish(model)
        grads.clip_grad_norm_(model, 1.0)
    with comm.record() as infer, torch.no_grad():
        model(tokens)
    return [Counter((e.axis, e.op, e.phase, len(e.ranks) if e.axis != "cp" else layout.cp, e.payload)
                    for e in each.entries) for each in (train, infer)]


def predicted(bill):
    calls = Counter()
    for c in bill.collectives:
        calls[c.axis, c.op, c.phase, c.ranks, c.payload] += c.count
    return calls


def check(pool, spec, layout, seq=13, dtype="fp32", frozen=(), recompute=None):
    train = traffic(spec, layout, 2, seq, dtype, recompute=recompute, frozen=frozen, start=True, clip=True,
                    bucket=BUCKET)
    infer = traffic(spec, layout, 2, seq, dtype, backward=False, head="logits")
    for calls in pool(layout.world_size).run(step, spec, layout, seq, dtype, frozen, recompute):
        assert calls == [predicted(train), predicted(infer)]
    return train


@pytest.mark.parametrize("layout", [Layout(cp=2), Layout(cp=3), Layout(cp=4), Layout(dp=2, cp=2), Layout(2, cp=2),
                                    Layout(2, cp=2, sp="again")], ids=lambda layout: layout.degrees)
def test_each_call(pool, layout):
    for seq in (13, 12):
        check(pool, ModelSpec(**SIZES), layout, seq)


@pytest.mark.parametrize("recompute", [None, "selective", "full"])
def test_a_ring_that_is_computed_again_goes_round_again(pool, recompute):
    spec = ModelSpec(**SIZES | dict(qk_norm=True))
    for frozen in ((), ("embed_tokens", "layers.0"), ("embed_tokens", "layers.0.input_layernorm", "layers.0.self_attn"),
                   ("layers.1", "layers.2", "norm")):
        check(pool, spec, Layout(cp=2), frozen=frozen, recompute=recompute)


@pytest.mark.parametrize("dtype", ["bf16", "fp64"])
def test_gradients_go_round_in_32_bits_at_least(pool, dtype):
    bill = check(pool, ModelSpec(**SIZES), Layout(cp=3), dtype=dtype)
    there, back = (sum(c.payload for c in bill.where("send", "backward") if c.what == what)
                   for what in ("keys and values", "their gradients"))
    assert back == there * (2 if dtype == "bf16" else 1)


def test_latent_attention_sends_the_keys_of_all_heads(pool):
    bill = check(pool, ModelSpec(**SIZES | LATENT), Layout(cp=2), seq=8)
    keys = bill.where("send", "forward")[0]
    assert keys.payload == 2 * 4 * 12 * (6 + 4) * 4  # two sequences, 4 of 8 tokens, 12 heads
