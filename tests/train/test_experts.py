"""Training a mixture of experts with the one loop: alone, cut, and in a pipeline; what it reports of loads."""

import math

import pytest
import torch

from shardlab.model import Rules, Transformer, initialise
from shardlab.parallel import data, expert, mesh, pipeline
from shardlab.schedule import one_f_one_b
from shardlab.specs import ModelSpec
from shardlab.specs.experts import Experts
from shardlab.train import Batches, text, train

EXPERTS = dict(routed=4, active=2, ffn=11, first_dense=1, score="sigmoid", routing_bias=True)
STEPS = range(6)  # over the end of an epoch, whose last step has fewer sequences


def batches():
    return Batches(text()[:600], seq=16, batch=8, accumulation=2, seed=1)


def plain(rules=(), **experts):
    spec = ModelSpec(hidden=16, layers=3, heads=4, kv_heads=2, head_dim=4, ffn=22, vocab=256, tied=True,
                     experts=Experts(**(EXPERTS | experts)))
    model = initialise(Transformer(spec, rules=Rules(**dict(rules))), seed=3, std=0.2).double()
    return model


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def biases(model):
    return [value.tolist() for name, value in model.state_dict().items() if name.endswith("correction_bias")]


@pytest.fixture(scope="module")
def alone():
    model = plain()
    return train(model, adamw(model), batches(), STEPS, progress=False, bias_rate=0.02), biases(model)


def on_ranks(group, axes):
    of = {name: mesh.build(**axes).get_group(name) for name in axes}
    model, orders = plain(), None
    expert.cut(model, of["ep"])
    if "pp" in of:
        orders = one_f_one_b(2, 2)
        pipeline.cut(model, of["pp"], orders)
    data.replicate(model, of["ep"])
    steps = train(model, adamw(model), batches(), STEPS, of["ep"], progress=False, orders=orders, bias_rate=0.02)
    return steps, biases(model)


@pytest.mark.parametrize("axes", [dict(ep=2), dict(ep=4), dict(pp=2, ep=2)], ids=str)
def test_the_same_run_on_ranks(pool, alone, axes):
    """Losses, norms, loads, and the biases that follow them, of each layer's on the ranks that have it."""
    steps, known = alone
    for ours, mine in pool(math.prod(axes.values())).run(on_ranks, axes):
        assert [each.loads for each in ours] == [each.loads for each in steps]
        for a, b in zip(ours, steps, strict=True):
            assert a.tokens == b.tokens and a.dropped == b.dropped == 0
            assert math.isclose(a.loss, b.loss, rel_tol=1e-10) and math.isclose(a.norm, b.norm, rel_tol=1e-8)
        assert mine and all(each in known for each in mine)


def test_loads_are_of_tokens_that_are_there(alone):
    """FAULTS E8: what fills up the last step of an epoch goes to no expert, and takes no place in any."""
    steps, known = alone
    tokens = 600 - 1
    for epoch in (steps[:5], steps[5:]):
        for layer in range(2):
            assert all(sum(each.loads[layer]) == 2 * each.tokens for each in epoch)
    assert sum(each.tokens for each in steps[:5]) == tokens
    assert all(1 < each.skew <= 2 for each in steps)
    steps = train(model := plain(dict(capacity=1.0)), adamw(model), batches(), range(5), progress=False)
    assert all(sum(map(sum, each.loads)) == 4 * each.tokens for each in steps) and steps[0].dropped > 0
    assert biases(model) == [[0] * 4] * 2 != known


def test_a_step_that_is_skipped_moves_no_bias():
    model = plain()
    model.norm.weight.data[0] = math.inf
    before = biases(model)
    steps = train(model, adamw(model), batches(), range(1), progress=False, bias_rate=0.1)
    assert not math.isfinite(steps[0].norm) and biases(model) == before and sum(map(sum, steps[0].loads))


def test_a_rate_for_a_model_without_the_bias_is_refused():
    model = plain(routing_bias=False)
    with pytest.raises(ValueError, match=r"no routing bias to move.*Rules\(balance=\)"):
        train(model, adamw(model), batches(), range(1), progress=False, bias_rate=0.1)
    assert all(map(torch.equal, plain(routing_bias=False).parameters(), model.parameters()))  # before anything is done


def test_loads_become_more_even():
    """Of a router that prefers one expert, at first, and learns slowly."""
    model = plain()
    for layer in model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias.data[1] = 0.5
    slow = torch.optim.AdamW(model.parameters(), lr=0.0005)
    steps = train(model, slow, batches(), range(30), progress=False, bias_rate=0.03)
    loads = torch.tensor([each.loads for each in steps[-5:]]).sum(0).double()
    assert steps[0].skew == 2 and (loads.amax(1) / loads.mean(1)).max() < 1.3, (steps[0].skew, loads)
