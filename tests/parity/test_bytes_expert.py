"""The bytes of the expert axis, predicted from what the routers chose and counted: each call, and what is held.

Over ep alone, over ep inside dp with copies of experts, over all of them with cut sequences, and under ZeRO; an expert
without a token, full experts, layers computed again, several passes.
"""

from collections import Counter

import pytest
import torch
from test_bytes_data import held, size

from shardlab import comm
from shardlab.cost import memory, traffic
from shardlab.model.router import Rules
from shardlab.model.transformer import Transformer
from shardlab.parallel import context, data, expert, grads, mesh, zero
from shardlab.parallel.gathering import alone
from shardlab.specs import Experts, Layout, ModelSpec, dtype_of

SIZES = dict(hidden=12, layers=3, heads=4, kv_heads=2, head_dim=4, ffn=20, vocab=29)
SOFTMAX = Experts(routed=6, active=2, ffn=10)
SIGMOID = Experts(routed=12, active=3, ffn=6, shared=1, first_dense=1, routing_bias=True, score="sigmoid", groups=3,
                  top_groups=2)
BUCKET = 4_000
DROPLESS = Rules()
LAYOUTS = [Layout(dp=2, ep=2), Layout(dp=3, ep=3), Layout(dp=4, ep=2), Layout(dp=4, ep=1), Layout(cp=2, ep=2),
           Layout(dp=2, cp=2, ep=2)]


def step(_group, spec, layout, dtype="fp32", frozen=(), recompute=None, passes=1, rules=DROPLESS, use=None):
    """A step recorded; what the routers chose; the bytes held after it. Each replica has tokens of its own."""
    ep, copies = layout.ep, layout.expert_replicas
    world = layout.world_size
    experts = mesh.build(edp=copies, ep=ep)
    everyone = mesh.build(dp=world).get_group("dp")
    torch.manual_seed(0)
    model = Transformer(spec, recompute, rules=rules).to(getattr(torch, dtype_of(dtype).torch))
    for layer in model.layers:
        if hasattr(layer.mlp, "gate"):  # the first expert gets nothing, the last is asked for by many
            layer.mlp.gate.weight.data[0] = 0.0
            layer.mlp.gate.weight.data[-1] += 0.1
    for name, parameter in model.named_parameters():
        if any(f"{name}.".startswith(f"{each}.") for each in frozen):
            parameter.requires_grad_(False)
    replica = everyone.rank() // layout.cp
    tokens = torch.randint(0, spec.vocab, (passes, 2, 7), generator=torch.Generator().manual_seed(replica))
    routed = []
    with comm.record() as ledger, comm.use(**use or {}):
        if ep > 1:
            expert.cut(model, experts.get_group("ep"), experts.get_group("edp") if copies > 1 else None)
        if layout.cp > 1:
            context.cut(model, mesh.build(outer=layout.dp, cp=layout.cp).get_group("cp"))
        optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
        if layout.zero:
            zero.shard(model, optimizer, everyone, layout.zero, BUCKET)
        else:
            data.replicate(model, everyone, BUCKET)
        for i, each in enumerate(tokens):
            with data.no_sync(model) if i < passes - 1 else comm.use():
                model.loss(each, each.roll(-1, 1), 100, routed=routed).backward()
        grads.finish(model)
        grads.clip_grad_norm_(model, 1.0)
        optimizer.step()
    calls = Counter((e.axis, e.op, e.phase, len(e.ranks), e.payload) for e in ledger.entries)
    wire = sum(e.wire for e in ledger.entries if e.axis == "ep" and e.op == "all_to_all")
    nbytes = held(model, optimizer)
    if layout.zero == 3:  # of which that counts as weights what is shared out, and the rest with the states
        more = size(parameter.data for parameter in alone(model))
        trained = size(parameter.data for parameter in alone(model) if parameter.requires_grad)
        low = dtype == "bf16"  # then the optimizer steps copies
        nbytes["weights"] += more
        nbytes["states"] -= 0 if low else trained
    dropped = sum(each.dropped for each in routed)
    return calls, [each.counts for each in routed], nbytes, wire, dropped


def check(pool, spec, layout, dtype="fp32", frozen=(), recompute=None, passes=1, rules=DROPLESS, use=None):
    ranks = pool(layout.world_size).run(step, spec, layout, dtype, frozen, recompute, passes, rules, use)
    routed = [counts for _, counts, *_ in ranks]
    bills = [traffic(spec, layout, 2, 7, dtype, recompute=recompute, accumulate=passes, frozen=frozen, rank=rank,
                     start=True, clip=True, bucket=BUCKET, routed=routed) for rank in range(layout.world_size)]
    for rank, (bill, (calls, _, bytes_held, *_)) in enumerate(zip(bills, ranks, strict=True)):
        assert calls == predicted(bill)
        states = memory(spec, layout, dtype, training=True, frozen=frozen, rank=rank, bucket=BUCKET)
        assert bytes_held == {kind: getattr(states, kind) for kind in bytes_held}
    return bills, ranks


def predicted(bill):
    calls = Counter()
    for c in bill.collectives:
        calls[c.axis, c.op, c.phase, c.ranks, c.payload] += c.count
    return calls


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.degrees)
@pytest.mark.parametrize("experts", [SOFTMAX, SIGMOID], ids=["softmax", "sigmoid"])
def test_each_call_and_all_that_is_held(pool, experts, layout):
    bills, ranks = check(pool, ModelSpec(**SIZES, experts=experts), layout)
    if layout.ep > 1:  # the routing is skewed: ranks send differently
        assert len({bill.total("all_to_all") for bill in bills}) > 1
    most = traffic(bills[0].spec, layout, 2, 7, start=True, clip=True, bucket=BUCKET,
                   routed=[counts for _, counts, *_ in ranks])
    assert most.total() == max(bill.total() for bill in bills)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("experts", [SOFTMAX, SIGMOID], ids=["softmax", "sigmoid"])
def test_zero_leaves_spread_experts_as_they_are(pool, experts, stage):
    spec = ModelSpec(**SIZES, experts=experts)
    for layout in (Layout(dp=4, ep=2, zero=stage), Layout(dp=2, ep=2, zero=stage), Layout(dp=3, zero=stage)):
        check(pool, spec, layout, passes=2)
    check(pool, ModelSpec(**SIZES, experts=SOFTMAX), Layout(dp=4, ep=2, zero=stage), dtype="bf16")


@pytest.mark.parametrize("recompute", [None, "selective", "full"])
def test_rows_of_layers_computed_again_travel_again(pool, recompute):
    check(pool, ModelSpec(**SIZES, experts=SIGMOID), Layout(dp=2, ep=2), recompute=recompute, passes=2)


def test_what_is_frozen_and_what_is_dropped(pool):
    spec, layout = ModelSpec(**SIZES, experts=SOFTMAX), Layout(dp=4, ep=2)
    for frozen in (("embed_tokens", "layers.0"), ("layers.1.mlp.experts",), ("layers.2.mlp.experts.4",)):
        check(pool, spec, layout, frozen=frozen)
    _, ranks = check(pool, spec, layout, dtype="fp64", rules=Rules(capacity=0.5))
    assert all(dropped > 0 for *_, dropped in ranks)


def test_what_an_all_to_all_sends(pool):
    """Counted at every send: all but the rows whose experts are here."""
    bills, ranks = check(pool, ModelSpec(**SIZES, experts=SOFTMAX), Layout(dp=3, ep=3), use=dict(algorithm="pairwise"))
    for bill, (*_, wire, _) in zip(bills, ranks, strict=True):
        assert wire == bill.wire("all_to_all") < bill.total("all_to_all")


def test_what_no_router_has_chosen_has_no_bill():
    spec, layout = ModelSpec(**SIZES, experts=SOFTMAX), Layout(dp=2, ep=2)
    with pytest.raises(ValueError, match="ep = 2: what travels depends on what the router chooses: give routed="):
        traffic(spec, layout, 2, 7)
    with pytest.raises(ValueError, match=r"routed has 1 ranks with \[3\] passes .*; 2 with 3 × 1 each are wanted"):
        traffic(spec, layout, 2, 7, routed=[[(1,) * 6] * 3])
    with pytest.raises(ValueError, match=r"routed counts \[5\] experts, and a layer of model has 6"):
        traffic(spec, layout, 2, 7, routed=[[(1,) * 5] * 3] * 2)
    with pytest.raises(ValueError, match=r"layers.2.mlp.experts.4 is on some of the ranks only, ep = 2: .* rank="):
        memory(spec, layout, training=True, frozen=("layers.2.mlp.experts.4",))
