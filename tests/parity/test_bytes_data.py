"""The bytes of the data axis, predicted and counted: every collective of a step, and what is held after it.

Over dp and over dp × tp, plain and ZeRO 1 to 3, with and without sequence parallelism: each call by axis, op, phase and
payload, on every rank.
"""

from collections import Counter

import pytest
import torch

from shardlab import comm
from shardlab.cost import memory, traffic
from shardlab.model.transformer import Transformer
from shardlab.parallel import data, grads, mesh, tensor, zero
from shardlab.specs import Layout, ModelSpec, dtype_of
from shardlab.train import loop

SIZES = dict(hidden=24, layers=3, heads=12, kv_heads=4, head_dim=4, ffn=90, vocab=101)
ODD = dict(hidden=18, layers=2, heads=6, kv_heads=3, head_dim=6, ffn=35, vocab=53, tied=True, qk_norm=True,
           attention_bias=True, output_bias=True, mlp_bias=True)
FROZEN = ("layers.0", "layers.1.mlp.up_proj")
BUCKET = 20_000
LAYOUTS = [Layout(dp=dp, zero=zero) for dp in (2, 3, 4) for zero in range(4)]


def step(_group, spec, layout, dtype="fp32", frozen=(), recompute=None, accumulate=1, use=None):
    """A step recorded, with 2 × 7 tokens a pass, and the bytes that this rank holds after it."""
    groups = mesh.build(dp=layout.dp, tp=layout.tp)
    model = Transformer(spec, recompute).to(getattr(torch, dtype_of(dtype).torch))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(name == each or name.startswith(f"{each}.") for each in frozen))
    tokens = torch.randint(0, spec.vocab, (accumulate, 2, 7), generator=torch.Generator().manual_seed(0))
    with comm.record() as ledger, comm.use(**use or {}):
        tensor.cut(model, groups.get_group("tp"), layout.sp)
        optimizer = torch.optim.AdamW(model.parameters())
        if layout.zero:
            zero.shard(model, optimizer, groups.get_group("dp"), layout.zero, BUCKET)
        else:
            data.replicate(model, groups.get_group("dp"), BUCKET)
        for each in tokens[:-1]:
            with data.no_sync(model):
                model.loss(each, each.roll(-1, 1), tokens.numel()).backward()
        model.loss(tokens[-1], tokens[-1].roll(-1, 1), tokens.numel()).backward()
        grads.finish(model)
        grads.clip_grad_norm_(model, 1.0)
        optimizer.step()
    calls = Counter((e.axis, e.op, e.phase, len(e.ranks), e.payload) for e in ledger.entries)
    return calls, held(model, optimizer), sum(e.wire for e in ledger.entries)


def held(model, optimizer):
    """Bytes of the weights, of the gradients and of what the optimizer keeps, each piece of memory once."""
    reducer = getattr(model, "reducer", None)
    weights = [parameter.data for parameter in model.parameters()]
    if isinstance(reducer, zero.Stage3):
        weights = list(reducer.gathering.held.values())
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in (*model.parameters(), *own)]
    gradients += [bucket.row for bucket in reducer.buckets] if reducer else []
    states = [state for each in optimizer.state.values() for state in each.values()]
    master = [parameter.data for parameter in own]
    return {"weights": size(weights), "gradients": size(gradients),
            "states": size([*states, *master], without=weights)}


def size(tensors, without=()):
    """Bytes of the storages of these tensors, those of others left out."""
    def of(some):
        return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in some if t is not None}
    others = of(without)
    return sum(nbytes for where, nbytes in of(tensors).items() if where not in others)


def predicted(bill):
    calls = Counter()
    for c in bill.collectives:
        calls[c.axis, c.op, c.phase, c.ranks, c.payload] += c.count
    return calls


def check(pool, spec, layout, dtype="fp32", frozen=(), recompute=None, accumulate=1, use=None):
    how = dict(dtype=dtype, frozen=frozen, bucket=BUCKET)
    ranks = pool(layout.world_size).run(step, spec, layout, dtype, frozen, recompute, accumulate, use)
    bills = [traffic(spec, layout, 2, 7, recompute=recompute, accumulate=accumulate, rank=rank, start=True, clip=True,
                     **how) for rank in range(layout.world_size)]
    for rank, (bill, (calls, bytes_held, _)) in enumerate(zip(bills, ranks, strict=True)):
        assert calls == predicted(bill)
        states = memory(spec, layout, training=True, rank=rank, **how)
        assert bytes_held == {kind: getattr(states, kind) for kind in bytes_held}
    return bills, [wire for _, _, wire in ranks]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.degrees)
@pytest.mark.parametrize("sizes", [SIZES, ODD], ids=["even", "odd"])
def test_the_data_axis(pool, sizes, layout):
    check(pool, ModelSpec(**sizes), layout, use=dict(transport="shm"))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("zero", range(4))
def test_frozen_and_accumulated(pool, zero, tied):
    spec = ModelSpec(**SIZES | dict(tied=tied))
    for frozen in (("layers.0", "layers.1.mlp.up_proj"), ("embed_tokens", "layers.0", "layers.1.input_layernorm"),
                   ("embed_tokens", "layers", "norm") * (not tied)):
        check(pool, spec, Layout(dp=3, zero=zero), frozen=frozen, accumulate=3)


@pytest.mark.parametrize("zero", range(4))
def test_half_precision(pool, zero):
    """Weights and gradients travel in 16 bits; what a rank steps, and its sum of gradients, has 32."""
    for p in (2, 3):
        check(pool, ModelSpec(**ODD), Layout(dp=p, zero=zero), dtype="bf16", accumulate=2)


@pytest.mark.parametrize("sp", [False, "keep", "again"])
@pytest.mark.parametrize("zero", range(4))
def test_data_and_tensor(pool, zero, sp):
    check(pool, ModelSpec(**ODD | dict(kv_heads=1)), Layout(dp=2, tp=2, zero=zero, sp=sp), accumulate=2)


@pytest.mark.parametrize("recompute", [None, "selective", "full"])
@pytest.mark.parametrize("sp", [False, "keep", "again"])
def test_the_tensor_axis(pool, sp, recompute):
    """Seven tokens twice over 2, 3 and 4 ranks, with trained and with frozen parts: every pair of what varies."""
    parts = (), ("embed_tokens", "layers.0.input_layernorm", "layers.0.self_attn"), ("layers.1", "norm")
    turn = [False, "keep", "again"].index(sp) + [None, "selective", "full"].index(recompute)
    for i, (p, kv) in enumerate(((2, 6), (3, 3), (4, 2))):
        spec = ModelSpec(**ODD | dict(heads=12, kv_heads=kv, head_dim=4, tied=False))
        check(pool, spec, Layout(p, sp=sp), frozen=parts[(i + turn) % 3], recompute=recompute)


@pytest.mark.parametrize("zero", range(4))
def test_what_a_ring_sends(pool, zero):
    """Counted at every send; where sizes don't divide ranks send differently, and the bill is their mean."""
    bills, sent = check(pool, ModelSpec(**ODD), Layout(dp=3, zero=zero), use=dict(algorithm="ring"))
    assert sum(sent) == pytest.approx(sum(bill.wire() for bill in bills), rel=1e-12)


def looped(_group, spec, layout):
    """One step of the library's loop, two micro-batches, recorded; then a forward pass without gradients."""
    groups = mesh.build(dp=layout.dp, tp=layout.tp)
    model = tensor.cut(Transformer(spec), groups.get_group("tp"), layout.sp)
    optimizer = torch.optim.AdamW(model.parameters())
    zero.shard(model, optimizer, groups.get_group("dp"), layout.zero)
    tokens = torch.arange(14).view(2, 7)
    with comm.record() as train:
        loop.step(model, optimizer, [(tokens, tokens + 1)] * 2, groups.get_group("dp"))
    with comm.record() as infer, torch.no_grad():
        model(tokens)
    return [Counter((e.axis, e.op, e.phase, len(e.ranks), e.payload) for e in each.entries) for each in (train, infer)]


@pytest.mark.parametrize("layout", [Layout(dp=3, zero=3), Layout(2, dp=2, zero=3, sp="again")],
                         ids=lambda layout: layout.degrees)
def test_the_loop_and_a_pass_without_gradients(pool, layout):
    spec = ModelSpec(**SIZES)
    for rank, (train, infer) in enumerate(pool(layout.world_size).run(looped, spec, layout)):
        assert train == predicted(traffic(spec, layout, 2, 7, accumulate=2, rank=rank, loop=True))
        assert infer == predicted(traffic(spec, layout, 2, 7, backward=False, head="logits"))
