"""What the account predicts is what the run counts: every collective of a step, and every byte held."""

import pytest
import torch

from shardlab import comm
from shardlab.cost.memory import memory
from shardlab.cost.traffic import traffic
from shardlab.model.transformer import Transformer
from shardlab.parallel import grads, mesh, tensor
from shardlab.specs import Layout, ModelSpec

SIZES = dict(hidden=24, layers=3, heads=12, kv_heads=4, head_dim=4, ffn=90, vocab=101)
CASES = [(2, {}), (4, {}), (3, dict(kv_heads=3)), (4, dict(kv_heads=2, attention_bias=True, qk_norm=True, tied=True)),
         (3, dict(kv_heads=1, output_bias=True, mlp_bias=True)), (1, {})]


def step(group, spec, dtype, recompute=None):
    """A forward and a backward, recorded; then the bytes this rank holds."""
    group = mesh.build(tp=group.size()).get_group("tp")
    model = tensor.cut(Transformer(spec, recompute).to(dtype), group)
    tokens = torch.randint(0, spec.vocab, (2, 7), generator=torch.Generator().manual_seed(0))
    with comm.record() as train:
        model.loss(tokens, tokens.roll(-1, 1)).backward()
    with comm.record() as finish:
        grads.finish(model)
    with comm.record() as infer, torch.no_grad():
        model(tokens)
    weights = {id(p): p for p in model.parameters()}.values()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    states = [s for state in optimizer.state.values() for s in state.values()]
    held = {"weights": size(weights), "gradients": size(p.grad for p in weights), "optimizer": size(states)}
    return {"train": rows(train), "finish": rows(finish), "infer": rows(infer), "held": held}


def size(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def rows(ledger):
    return sorted((e.axis, e.op, e.phase, e.payload) for e in ledger.entries)


def predicted(bill, *phases):
    calls = [c for c in bill.collectives if c.phase in phases for _ in range(c.count)]
    return sorted((c.axis, c.op, c.phase, c.payload) for c in calls)


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
@pytest.mark.parametrize("p,sizes", CASES)
def test_counted_equals_predicted(pool, p, sizes, dtype):
    spec, layout = ModelSpec(**(SIZES | sizes)), Layout(tp=p)
    train = traffic(spec, layout, batch=2, seq=7, dtype=dtype, backward=True, head="loss")
    infer = traffic(spec, layout, batch=2, seq=7, dtype=dtype, backward=False, head="logits")
    bill = memory(spec, layout, dtype=dtype, training=True, optimizer="adamw")
    for counted in pool(p).run(step, spec, {"fp32": torch.float32, "fp64": torch.float64}[dtype]):
        assert counted["train"] == predicted(train, "forward", "backward")
        assert counted["finish"] == predicted(train, "finish")
        assert counted["infer"] == predicted(infer, "forward")
        assert counted["held"]["weights"] == bill.weights
        assert counted["held"]["gradients"] == bill.gradients
        assert counted["held"]["optimizer"] == bill.states


def test_two_all_reduces_a_layer_each_way(pool):
    """The claim everyone quotes, counted: 2 forward and 2 backward a layer, each of batch × seq × hidden × bytes."""
    spec = ModelSpec(**SIZES)
    counted = pool(2).run(step, spec, torch.float32)[0]["train"]
    block = 2 * 7 * spec.hidden * 4
    for phase in ("forward", "backward"):
        assert counted.count(("tp", "all_reduce", phase, block)) == 2 * spec.layers + 1  # and one of embedding or head


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("p,sizes", CASES[1:5])
def test_counted_equals_predicted_with_recomputation(pool, p, sizes, recompute):
    """A block computed again sums its attention again, in backward; its feed-forward block's sum isn't needed there."""
    spec, layout = ModelSpec(**(SIZES | sizes)), Layout(tp=p)
    bill = traffic(spec, layout, batch=2, seq=7, recompute=recompute)
    more = bill.count() - traffic(spec, layout, batch=2, seq=7).count()
    assert more == (spec.layers if recompute == "full" else 0)
    for counted in pool(p).run(step, spec, torch.float32, recompute):
        assert counted["train"] == predicted(bill, "forward", "backward")
        assert counted["finish"] == predicted(bill, "finish")
        assert counted["infer"] == predicted(traffic(spec, layout, 2, 7, backward=False, head="logits"), "forward")
