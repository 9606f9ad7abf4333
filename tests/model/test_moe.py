"""The mixture of experts against loops that do what it says, token by token and expert by expert."""

import copy
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shardlab.model import Rules, Transformer
from shardlab.model.moe import MoE
from shardlab.model.router import Router, Routing
from shardlab.specs import ModelSpec
from shardlab.specs.experts import Experts

SIZES = dict(hidden=12, layers=3, heads=2, kv_heads=1, head_dim=6, ffn=17, vocab=31)


def block(rules=(), tokens=10, seed=0, **experts):
    """A block of experts in float64, its input (tokens, hidden), and a routing of it in which all tokens are there."""
    torch.manual_seed(seed)
    spec = ModelSpec(**SIZES, experts=Experts(**(dict(routed=6, active=2, ffn=5) | experts)))
    moe = MoE(spec, Rules(**dict(rules))).double()
    for parameter in moe.parameters():
        parameter.data += 0.5 * torch.randn_like(parameter)
    return moe, torch.randn(tokens, SIZES["hidden"], dtype=torch.float64), there(moe, tokens)


def there(moe, tokens):
    return Routing(moe.gate, torch.ones(tokens, dtype=torch.bool))


def by_hand(moe, x, routing):
    """What the block should put out, from what `routing` says is kept."""
    spec, gate, kept = moe.gate.spec, moe.gate, set(routing.slots.tolist())
    logits = x @ gate.weight.T
    scores = logits.softmax(-1) if spec.score == "softmax" else logits.sigmoid()
    out = []
    for t, row in enumerate(x):
        chosen = routing.experts[t].tolist()
        total = sum(scores[t, e] for e in chosen) if spec.normalised else 1
        y = torch.zeros_like(row)
        for place, e in enumerate(chosen):
            if t * spec.active + place in kept:
                y = y + spec.scale * scores[t, e] / total * moe.experts[str(e)](row)
        out.append(y if moe.shared_experts is None else y + moe.shared_experts(row))
    return torch.stack(out)


WAYS = {
    "softmax": {}, "as they are": dict(normalised=False, active=3), "one": dict(active=1, normalised=False),
    "all": dict(active=6), "sigmoid": dict(score="sigmoid", scale=2.5, shared=2),
    "groups": dict(score="sigmoid", routing_bias=True, groups=3, top_groups=2, active=3, shared=1),
}


@pytest.mark.parametrize("rules", [{}, dict(capacity=0.8), dict(capacity=0.8, drop="weight")], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_a_token_gets_the_weighted_sum_of_its_experts(way, rules):
    """And so do gradients: of the input, of the experts, and of the router through the weights."""
    moe, x, routing = block(rules, **WAYS[way])
    x.requires_grad_()
    got = moe(x, routing)
    expected = by_hand(moe, x, routing)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    assert (routing.dropped > 0) == ("capacity" in rules)
    trained = [x, *(p for p in moe.parameters() if p.requires_grad)]
    direction = torch.randn_like(got)
    ours, theirs = (torch.autograd.grad(y, trained, direction, allow_unused=True) for y in (got, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, rtol=1e-10, atol=1e-12)


@given(st.data())
def test_a_plan_is_what_a_loop_makes(data):
    """Slots, counts, loads and what is dropped, for any choices, weights (many of them equal), padding and capacity."""
    n = data.draw(st.integers(1, 9), "experts")
    active = data.draw(st.integers(1, n), "active")
    tokens = data.draw(st.integers(0, 12), "tokens")
    capacity = data.draw(st.none() | st.sampled_from([0.01, 0.3, 0.5, 1.0, 1.1, 1.25, 2.0, 100.0]), "capacity")
    drop = data.draw(st.sampled_from(["position", "weight"]), "drop")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6), "seed"))
    router = Router(4, Experts(routed=n, active=active, ffn=1), Rules(capacity, drop))
    experts = torch.stack([torch.randperm(n, generator=generator)[:active] for _ in range(tokens)]) if tokens else \
        torch.empty(0, active, dtype=torch.int64)
    weights = torch.randint(1, 4, (tokens, active), generator=generator) / 4
    real = torch.rand(tokens, generator=generator) < data.draw(st.sampled_from([0.0, 0.6, 1.0]), "real")
    routing = Routing(router, real, experts)
    router.plan(routing, weights)

    queues = [[] for _ in range(n)]
    for t in range(tokens):
        for place in range(active):
            if real[t]:
                queues[experts[t, place]].append(t * active + place)
    most = math.inf if capacity is None else math.ceil(int(real.sum()) * active * Fraction(str(capacity)) / n)
    kept = []
    for queue in queues:
        if drop == "weight":
            queue = sorted(queue, key=lambda slot: (-weights.flatten()[slot].item(), slot))
        kept.append(sorted(queue if len(queue) <= most else queue[:most]))
    assert routing.slots.tolist() == [slot for queue in kept for slot in queue]
    assert routing.counts == tuple(map(len, kept))
    assert routing.load.tolist() == list(map(len, queues))
    assert routing.dropped == sum(map(len, queues)) - len(routing.slots)


def test_a_capacity_is_exact():
    """1.1 × 10 is 11, not 11.000000000000002, which would be rounded up to 12."""
    for capacity in (0.1, 0.7, 1.0, 1.1, 1.15, 1.25, 2.3):
        for n in (1, 5, 8, 11):
            router = Router(4, Experts(routed=n, active=1, ffn=1), Rules(capacity))
            for tokens in range(130):
                assert router.capacity(tokens) == math.ceil(Fraction(str(capacity)) * tokens / n)


def test_the_bias_chooses_and_does_not_weigh():
    moe, x, routing = block(score="sigmoid", routing_bias=True, routed=4, active=2, normalised=False)
    moe.gate.e_score_correction_bias.data = torch.tensor([9.0, 0, -9.0, 9.0], dtype=torch.float64)
    weights, scores = moe.gate(x, routing)
    assert routing.experts.sort(-1).values.tolist() == [[0, 3]] * len(x)
    torch.testing.assert_close(weights, scores.gather(1, routing.experts))


def test_groups_are_chosen_by_their_two_best():
    """DeepSeek-V3: of one very good expert and one that is bad, a group is not as good as of two that are good."""
    moe, x, routing = block(score="sigmoid", routed=4, active=2, groups=2, top_groups=1)
    moe.gate.weight.data.zero_()
    moe.gate.weight.data[:, 0] = torch.tensor([3.0, -3.0, 2.0, 1.0])
    x[:, 0] = 1
    moe.gate(x, routing)
    assert routing.experts.sort(-1).values.tolist() == [[2, 3]] * len(x)


def test_padding_takes_no_place():
    """FAULTS E8: with a capacity of one token, padding first: the real token is kept, and is what it is alone."""
    moe, x, _ = block(dict(capacity=1.0), tokens=4, active=1, routed=4)
    x[:] = x[3]  # all choose the same expert
    routing = Routing(moe.gate, torch.tensor([False, False, False, True]))
    y = moe(x, routing)
    assert (routing.slots.tolist(), routing.dropped, routing.load.sum()) == ([3], 0, 1)
    alone = moe(x[3:], there(moe, 1))
    assert torch.equal(y[3:], alone) and not y[:3].any()


@pytest.mark.parametrize("drop", ["position", "weight"])
def test_what_is_dropped_passes_by(drop):
    """FAULTS E9: nothing is added to its stream; the others get what they get where nothing is dropped, in order."""
    moe, x, routing = block(dict(capacity=0.5, drop=drop), tokens=12, active=1, routed=3, normalised=False)
    free = copy.deepcopy(moe)
    free.gate.rules = Rules()
    whole = free(x, there(free, len(x)))
    y = moe(x, routing)
    kept = torch.zeros(len(x), dtype=torch.bool)
    kept[routing.slots] = True
    assert 0 < routing.dropped == int((~kept).sum()) and int(kept.sum()) + routing.dropped == len(x)
    assert not y[~kept].any()
    torch.testing.assert_close(y[kept], whole[kept], rtol=1e-12, atol=1e-12)
    start = 0
    for count in routing.counts:
        assert routing.slots[start : start + count].tolist() == sorted(routing.slots[start : start + count].tolist())
        start += count


def test_rules_that_make_no_sense_are_refused():
    """FAULTS E9: a misspelt policy is refused where it is given."""
    for wrong, words in ((dict(drop="probs"), "'position', or those with the largest weights, 'weight'"),
                         (dict(capacity=0.0), "capacity"), (dict(capacity=-1.0), "capacity"),
                         (dict(balance=-0.1), "0 or more"), (dict(balance=math.nan), "0 or more")):
        with pytest.raises(ValueError, match=words):
            Rules(**wrong)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_balance_of_even_loads_is_1(score):
    moe, x, routing = block(dict(balance=1.0), tokens=60, routed=4, active=4, score=score)
    moe.gate.weight.data.zero_()
    moe(x, routing)
    assert math.isclose(routing.balance.item(), 1.0)
    moe, x, routing = block(dict(balance=1.0), tokens=60, routed=4, active=1, score=score, normalised=False)
    moe.gate.weight.data.zero_()
    moe.gate.weight.data[2, 0], x[:, 0] = 50.0, 1
    moe(x, routing)
    assert routing.load.tolist() == [0, 0, 60, 0]
    assert math.isclose(routing.balance.item(), 4.0 if score == "softmax" else 4 / 2.5)  # 1 ÷ (1 + 3 · ½)


def model(recompute=None, rules=(), dtype=torch.float64, **experts):
    torch.manual_seed(0)
    spec = ModelSpec(**SIZES, experts=Experts(**(dict(routed=6, active=2, ffn=5, first_dense=1) | experts)))
    out = Transformer(spec, recompute, rules=Rules(**dict(rules)))
    for parameter in out.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return out.to(dtype)


def batch(seed=0, shape=(3, 7)):
    return torch.randint(0, SIZES["vocab"], (2, *shape), generator=torch.Generator().manual_seed(seed))


def routers(plain):
    return torch.stack([each.gate.weight.grad for each in plain.modules() if isinstance(each, MoE)])


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("recompute", [None, "full"])
def test_the_balance_has_gradients(score, recompute):
    """FAULTS E5: the router's differs between coefficients 0 and 1 by exactly the balance's own; so does the loss."""
    (tokens, labels), found = batch(), []
    real = torch.arange(7).expand(3, 7) < torch.tensor([7, 4, 0]).unsqueeze(1)
    for coefficient in (0.0, 1.0):
        plain, routed = model(recompute, dict(balance=coefficient), score=score), []
        loss = plain.loss(tokens, labels, 40, routed, real)
        loss.backward()
        found.append((loss.detach(), routers(plain), [each.experts for each in routed]))
    plain, seen = model(None, {}, score=score), []
    for layer in plain.layers[1:]:
        layer.mlp.register_forward_pre_hook(lambda mlp, args: seen.append((mlp.gate, args[0])))
    plain.stream(tokens)
    total = 0.0
    for (gate, x), experts in zip(seen, found[0][2], strict=True):
        logits = x.flatten(0, 1)[real.flatten()] @ gate.weight.T
        scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
        share = torch.bincount(experts[real.flatten()].flatten(), minlength=6).double() / (2 * real.sum())
        total = total + 6 * (share * scores.mean(0)).sum() * real.sum() / 40
    total.backward()
    torch.testing.assert_close(found[1][0] - found[0][0], total.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found[1][1] - found[0][1], routers(plain), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("rules", [dict(balance=0.5), dict(balance=0.5, capacity=0.7, drop="weight")], ids=str)
def test_what_is_computed_again_is_not_chosen_again(recompute, rules):
    """FAULTS E7: one routing a layer and pass, the same loads, balance and gradients."""
    (tokens, labels), found = batch(), []
    for mode in (None, recompute):
        plain, routed = model(mode, rules), []
        loss = plain.loss(tokens, labels, None, routed)
        before = [(each.load.tolist(), each.dropped, each.balance.item()) for each in routed]
        loss.backward()
        assert before == [(each.load.tolist(), each.dropped, each.balance.item()) for each in routed]
        found.append((len(routed), before, loss.item(), {n: p.grad for n, p in plain.named_parameters()}))
    assert found[0][:2] == found[1][:2] and found[0][0] == 2
    assert math.isclose(found[0][2], found[1][2], rel_tol=1e-14)
    for name, gradient in found[0][3].items():
        torch.testing.assert_close(found[1][3][name], gradient, rtol=1e-12, atol=1e-14)


def test_choices_stay_where_the_router_has_moved_since():
    """Between forward and backward, a bias may be moved or a weight changed: what is computed again goes by the first
    choice, or experts would get gradients for tokens that they have not seen."""
    (tokens, labels), found = batch(), []
    for recompute in (None, "full"):
        plain = model(recompute, routing_bias=True, score="sigmoid")
        loss = plain.loss(tokens, labels)
        for layer in plain.layers[1:]:
            layer.mlp.gate.e_score_correction_bias.data += torch.arange(6) % 2 * 5.0
        loss.backward()
        found.append({n: p.grad for n, p in plain.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_of_16_bits_are_routed_in_32(dtype):
    plain = model(dtype=dtype, routing_bias=True, score="sigmoid", groups=3, top_groups=2)
    gates = [each.gate for each in plain.modules() if isinstance(each, MoE)]
    assert {gate.weight.dtype for gate in gates} == {dtype}
    assert {gate.e_score_correction_bias.dtype for gate in gates} == {torch.float32}
    gates[0].e_score_correction_bias.data[:] = 1 + 1e-4 * torch.arange(6)  # which 16 bits can't tell apart
    gates[0].weight.data.zero_()
    tokens, labels = batch()
    seen, routed = [], []
    gates[0].register_forward_hook(lambda *args: seen.append(args[-1]))
    loss = plain.loss(tokens, labels, None, routed)
    loss.backward()
    assert routed[0].experts.sort(-1).values.eq(torch.tensor([4, 5])).all()
    assert [each.dtype for each in seen[0]] == [dtype, torch.float32] and loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in plain.parameters() if p.requires_grad)


def test_an_expert_without_tokens_has_gradients_of_zero():
    """Not none: an optimizer that lets weights decay would treat it as another."""
    moe, x, routing = block(routing_bias=True)
    moe.gate.e_score_correction_bias.data[4] = -99
    moe(x, routing).sum().backward()
    assert routing.counts[4] == 0
    assert all(p.grad is not None and not p.grad.any() for p in moe.experts["4"].parameters())


@pytest.mark.parametrize("shape", [(0, 5), (2, 1)])
@pytest.mark.parametrize("rules", [{}, dict(balance=0.3, capacity=1.0, drop="weight")], ids=str)
def test_passes_of_next_to_nothing(shape, rules):
    tokens, labels = batch(shape=shape)
    plain, routed = model(rules=rules), []
    plain.loss(tokens, labels, 10, routed).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in plain.parameters())
    assert sum(int(each.load.sum()) for each in routed) == 2 * 2 * tokens.numel()


def test_real_tokens_do_not_see_padding():
    """What is after the last real token changes nothing before it: not the loss, not a load, not what is dropped."""
    (tokens, labels), found = batch(), []
    real = torch.arange(7).expand(3, 7) < 5
    labels[:, 5:] = -100
    for other in (tokens, tokens.where(real, 3)):
        plain, routed = model(rules=dict(capacity=0.5, balance=0.2)), []
        loss = plain.loss(other, labels, None, routed, real)
        found.append((loss.item(), [each.load.tolist() for each in routed], [each.dropped for each in routed]))
    short, routed = model(rules=dict(capacity=0.5, balance=0.2)), []
    loss = short.loss(tokens[:, :5], labels[:, :5], None, routed)
    found.append((loss.item(), [each.load.tolist() for each in routed], [each.dropped for each in routed]))
    assert found[0][1:] == found[1][1:] == found[2][1:]
    assert all(math.isclose(found[0][0], loss, rel_tol=1e-13) for loss, *_ in found[1:])


def test_who_keeps_what_was_chosen_keeps_no_graph():
    (tokens, labels), routed = batch(), []
    model(rules=dict(balance=0.3)).loss(tokens, labels, None, routed)
    assert all(each.balance is not None and not each.balance.requires_grad for each in routed)


def test_names_and_shapes_are_those_of_the_spec():
    plain = model(routing_bias=True, shared=2)
    assert isinstance(plain.layers[0].mlp, nn.Module) and not isinstance(plain.layers[0].mlp, MoE)
    assert {name: tuple(p.shape) for name, p in plain.named_parameters()} == {
        tensor.name: tensor.shape for tensor in plain.spec.tensors()}
