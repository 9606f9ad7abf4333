"""Faults of others' expert parallelism (FAULTS, "Experts and sequence", and D12): each is a test here.

E8 and E9, which need no second rank, are in tests/model/test_moe.py. What is wrong here is wrong without a word, or
hangs: tokens that meet other experts than theirs, gradients of some ranks' tokens, collectives that not all come to.
"""

import pytest
import torch

from shardlab import comm
from shardlab.model import Rules, Transformer, initialise
from shardlab.model.moe import MoE
from shardlab.model.router import Routing
from shardlab.parallel import balance, data, expert, grads, mesh, zero
from shardlab.specs import ModelSpec
from shardlab.specs.experts import Experts

SIZES = dict(hidden=12, layers=2, heads=2, kv_heads=1, head_dim=6, ffn=17, vocab=31)


def model_of(recompute=None, rules=(), seed=0, **experts):
    torch.manual_seed(seed)
    spec = ModelSpec(**SIZES, experts=Experts(**(dict(routed=4, active=2, ffn=5, routing_bias=True) | experts)))
    model = Transformer(spec, recompute, rules=Rules(**dict(rules))).double()
    for name, parameter in model.named_parameters():
        parameter.data += 0.0 if name.endswith("correction_bias") else 0.3 * torch.randn_like(parameter)
    return model


def gates(model):
    return [each.gate for each in model.modules() if isinstance(each, MoE)]


def push(model, *by):
    """Make the experts more or less likely to be chosen."""
    for gate in gates(model):
        gate.e_score_correction_bias.data[: len(by)] += torch.tensor(by, dtype=torch.float64)
    return model


def batch(rank, shape=(2, 5)):
    tokens = torch.randint(0, 31, (2, *shape), generator=torch.Generator().manual_seed(rank))
    return tokens[0], tokens[1]


def cut(group, model, edp=1):
    if edp > 1:
        of = mesh.build(edp=edp, ep=group.size() // edp)
        expert.cut(model, of.get_group("ep"), of.get_group("edp"))
    else:
        expert.cut(model, group)
    return data.replicate(model, group)


def backward(group, model, p=4):
    """Each rank runs its share of p parts; gradients are finished."""
    parts = [batch(i) for i in range(p)][group.rank() :: group.size()]
    for i, part in enumerate(parts):
        with data.no_sync(model) if i < len(parts) - 1 else torch.enable_grad():
            model.loss(*part, p * 10).backward()
    grads.finish(model)
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def plain(p=4, **how):
    model = model_of(**how)
    for i in range(p):
        model.loss(*batch(i), p * 10).backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def idle(group, recompute):
    """All tokens of all ranks go to the first rank's experts: the others' gradients, and whether all had any."""
    model = cut(group, push(model_of(recompute), 50.0, 40.0))
    mine = {name: each for name, each in backward(group, model).items() if ".experts." in name}
    held = [name for name, _ in model.named_parameters() if ".experts." in name]
    return list(mine) == held, max(each.abs().max().item() for each in mine.values())


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("recompute", [None, "full"])
def test_e1_a_rank_whose_experts_nobody_chooses(pool, p, recompute):
    """Megatron-LM#3626: it returned a fresh tensor, and the others waited in backward's all-to-all for ever."""
    outcomes = pool(p).run(idle, recompute)
    assert all(there for there, _ in outcomes)
    busy = 1 if p == 2 else 2
    assert [largest > 0 for _, largest in outcomes] == [True] * busy + [False] * (p - busy)


def no_tokens(group):
    """The last rank has padding alone, in the first step, and labels none in the second."""
    model, last = cut(group, model_of(rules=dict(balance=0.1))), group.rank() == group.size() - 1
    for step in range(2):
        tokens, labels = batch(group.rank())
        real = torch.full(tokens.shape, not (last and step == 0))
        labels = labels * 0 - 100 if last and step else labels
        model.loss(tokens, labels, 10 * (group.size() - step), None, real).backward()
        grads.finish(model)
        assert grads.norm(model).isfinite()
        model.zero_grad()
    return all(each.grad is None for each in model.parameters())


def test_e1_a_rank_without_tokens_or_labels(pool):
    assert pool(2).run(no_tokens) == [True, True]


def sums(group, edp=1):
    return backward(group, cut(group, model_of(rules=dict(balance=0.2)), edp))


@pytest.mark.parametrize("p,edp", [(2, 1), (4, 1), (4, 2), (4, 4)])
def test_e3_gradients_are_the_same_on_any_number_of_ranks(pool, p, edp):
    """megablocks#20, #86, Megatron-LM#5956: experts' were as many times too large."""
    expected, found = plain(rules=dict(balance=0.2)), {}
    for mine in pool(p).run(sums, edp):
        found |= mine
        for name, gradient in mine.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-13)
    assert found.keys() == expected.keys()


def through(group, whole):
    """A rank's own block of experts: dX of its own tokens, of different numbers on the ranks."""
    model = model_of()
    if not whole:
        expert.cut(model, group)
    block = model.layers[1].mlp
    torch.manual_seed(group.rank())
    x = torch.randn(1, 3 + 4 * group.rank(), 12, dtype=torch.float64, requires_grad=True)
    y = block(x, Routing(block.gate, torch.ones(x.shape[1], dtype=torch.bool)))
    y.backward(torch.randn_like(y))
    return y.detach(), x.grad


def both(group):
    return through(group, True), through(group, False)


@pytest.mark.parametrize("p", [2, 4])
def test_e4_the_gradient_of_the_input(pool, p):
    """Automodel#1260: backward of a gather was a slice."""
    for (y, dx), (ours, dours) in pool(p).run(both):
        torch.testing.assert_close(ours, y, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(dours, dx, rtol=1e-12, atol=1e-13)


def coefficients(group):
    """Gradients of the routers, and losses, with coefficients 0 and 1 of the load-balance loss."""
    out = []
    for coefficient in (0.0, 1.0):
        mine = backward(group, cut(group, model_of(rules=dict(balance=coefficient))))
        out.append({name: each for name, each in mine.items() if ".gate." in name})
    return out


def test_e5_the_balance_reaches_the_router(pool):
    """Automodel#1408: what the function returned was dropped, so there never was a gradient, whatever the number."""
    expected = [plain(rules=dict(balance=coefficient)) for coefficient in (0.0, 1.0)]
    for without, with_it in pool(2).run(coefficients):
        assert without
        for name in without:
            assert (with_it[name] - without[name]).abs().max() > 1e-3
            torch.testing.assert_close(without[name], expected[0][name], rtol=1e-10, atol=1e-13)
            torch.testing.assert_close(with_it[name], expected[1][name], rtol=1e-10, atol=1e-13)


def told(group):
    """What is reported of a step, computed once or twice: passes, loads, dropped, balance, all-to-alls in forward."""
    out = []
    for recompute in (None, "full", "selective"):
        model, routed = cut(group, model_of(recompute, dict(balance=0.5, capacity=0.8))), []
        with comm.record() as ledger:
            model.loss(*batch(group.rank()), 20, routed).backward()
        grads.finish(model)
        loads, dropped = balance.loads(model, routed, group)
        met = sum(each.op == "all_to_all" and each.dtype == "int64" for each in ledger.entries)
        out.append((len(routed), loads.tolist(), dropped, [each.balance.item() for each in routed], met))
    return out


def test_e7_what_is_computed_again_is_counted_once(pool):
    """Megatron-LM#1331: under recomputation the loss was logged twice. Nor do ranks tell each other twice."""
    plain, passes = model_of(rules=dict(balance=0.5, capacity=0.8)), []
    for rank in range(2):
        plain.loss(*batch(rank), 20, passes)
    loads, dropped = balance.loads(plain, passes)
    for rank, outcome in enumerate(pool(2).run(told)):
        assert outcome[0] == outcome[1] == outcome[2]
        count, ours, lost, value, met = outcome[0]
        assert (count, ours, lost, met) == (2, loads.tolist(), dropped, 2) and dropped > 0
        assert value == pytest.approx([each.balance.item() for each in passes[2 * rank :][:2]], rel=1e-12)


def uneven(group):
    with pytest.raises(ValueError, match=r"7 experts do not divide over 2 ranks: 1, 7 would do"):
        expert.cut(model_of(routed=7), group)
    return True


def test_e12_experts_that_do_not_divide(pool):
    """vllm-ascend#16384."""
    assert pool(2).run(uneven) == [True, True]


def moved(group, order, edp):
    """The norm, by 2 and by infinity, with the experts in that order."""
    model = model_of(routed=8)
    state = model.state_dict()
    for name, value in model.state_dict().items():
        before, is_expert, rest = name.partition(".experts.")
        if is_expert:
            number, _, kind = rest.partition(".")
            state[f"{before}.experts.{order.index(int(number))}.{kind}"] = value.clone()
        elif ".gate." in name:
            state[name] = value[order]
    model.load_state_dict(state)
    backward(group, cut(group, model, edp))
    return grads.norm(model).item(), grads.norm(model, float("inf")).item()


@pytest.mark.parametrize("p,edp", [(2, 1), (4, 2)])
def test_d12_the_norm_is_the_same_wherever_experts_are(pool, p, edp):
    """DeepSpeed#5259, #8475, Megatron-LM#5916: experts' were averaged over ranks, or left out."""
    gradients = plain(routed=8).values()
    expected = (torch.linalg.vector_norm(torch.stack([each.norm() for each in gradients])).item(),
                max(each.abs().max().item() for each in gradients))
    for order in (range(8), (7, 0, 3, 1, 2, 6, 5, 4)):
        for norms in pool(p).run(moved, list(order), edp):
            assert norms == pytest.approx(expected, rel=1e-12)


def alone_frozen(group):
    """All of the first rank's experts are frozen, so that it has nothing to add: it has to take part all the same."""
    model = model_of()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and ".experts.0." not in name and ".experts.1." not in name)
    backward(group, cut(group, model))
    return grads.norm(model).item()


def test_a_rank_whose_experts_are_all_frozen_takes_part_in_the_norm(pool):
    gradients = [each for name, each in plain().items() if ".experts.0." not in name and ".experts.1." not in name]
    expected = torch.linalg.vector_norm(torch.stack([each.norm() for each in gradients])).item()
    assert pool(2).run(alone_frozen) == pytest.approx([expected] * 2, rel=1e-12)


# calls that would train on some of the tokens, or mix ranks up, without a word


def message(error, call, *args, **how):
    with pytest.raises(error) as caught:
        call(*args, **how)
    return str(caught.value)


def not_all_tokens(group):
    """No data axis; replicas of experts that nothing sums; a data axis that leaves out some of them."""
    axes = mesh.build(edp=2, ep=2)
    ep, edp = axes.get_group("ep"), axes.get_group("edp")
    without, forgotten, short = model_of(), model_of(), model_of()
    expert.cut(without, group)
    expert.cut(forgotten, ep)
    data.replicate(forgotten, group)
    expert.cut(short, ep, edp)
    data.replicate(short, ep)
    out = []
    for model in (without, forgotten, short):
        model.loss(*batch(group.rank()), 40).backward()
        out.append(message(RuntimeError, grads.finish, model))
    return out


def test_experts_are_trained_on_the_tokens_of_all_ranks(pool):
    for without, forgotten, short in pool(4).run(not_all_tokens):
        assert "experts lie on 4 ranks, 1 of them" in without and "the model on 1, 1 of them" in without
        assert "experts lie on 2 ranks, 1 of them" in forgotten and "the model on 4, 4 of them" in forgotten
        assert "experts lie on 4 ranks, 2 of them" in short and "the model on 2, 2 of them" in short
        assert all("give expert.cut as `replicas`" in each for each in (without, forgotten, short))


def disagree(group):
    """Ranks with other rules, specs or dtypes; one that computes again; replicas of other experts; or frozen ones."""
    r = group.rank()
    axes = mesh.build(edp=2, ep=2)
    ep, edp = axes.get_group("ep"), axes.get_group("edp")
    out = [message(ValueError, expert.cut, each, group) for each in (
        model_of(rules=dict(capacity=1.0 + r)), model_of(active=1 + r % 2), model_of("full" if r else None),
        model_of().to(torch.float32 if r else torch.float64))]
    out.append(message(ValueError, expert.cut, model_of(), ep, ep))
    model = model_of()
    if edp.rank():
        model.get_parameter(f"layers.1.mlp.experts.{2 * ep.rank()}.up_proj.weight").requires_grad_(False)
    expert.cut(model, ep, edp)
    out.append(message(ValueError, data.replicate, model, group))
    return out


def test_ranks_that_disagree_are_told_on_all(pool):
    for *others, replicas, frozen in pool(4).run(disagree):
        assert all("has another model or other rules than the first of its group" in each for each in others)
        assert "has another model, or other experts, than the first of `replicas`" in replicas
        assert "in what is frozen or which parts" in frozen


def misused(group):
    dense = Transformer(ModelSpec(**SIZES))
    replicated = data.replicate(model_of(), group)
    again = expert.cut(model_of(), group)
    unbiased, passes = model_of(routing_bias=False), []
    unbiased.loss(*batch(0), None, passes)
    return [message(ValueError, expert.cut, dense, group), message(ValueError, expert.cut, replicated, group),
            message(ValueError, expert.cut, again, group), message(ValueError, initialise, again),
            message(ValueError, balance.loads, dense, []), message(ValueError, balance.even, unbiased, passes, 0.1),
            message(ValueError, balance.even, model_of(), passes, 0.1),
            message(ValueError, balance.even, again, [], 0.0)]


def test_what_makes_no_sense_is_refused(pool):
    for none, late, twice, drawn, dense, unbiased, foreign, rate in pool(2).run(misused):
        assert "has no experts to cut" in none and "cut it before that" in late and "cut already" in twice
        assert "is cut or shared out already" in drawn  # each rank would draw the first experts' numbers
        assert "has no experts" in dense and "no routing bias" in unbiased and "another model" in foreign
        assert "rate" in rate


def optimizers(group, stage):
    """Under ZeRO: the experts' states, in the whole optimizer's, and back into another one; frozen ones on one rank."""
    out = []
    for begun in (None, "loaded"):
        model = model_of()
        for name, each in model.named_parameters():
            each.requires_grad_(each.requires_grad and ".experts.1." not in name)
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)
        expert.cut(model, group)
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)
        zero.shard(model, optimizer, group, stage)
        if begun:
            zero.load_state_dict(model, optimizer, out[0][1])
            with zero.gathered(model):
                model.load_state_dict(out[0][0])
        for _ in range(2):
            backward(group, model)
            optimizer.step()
            optimizer.zero_grad()
            assert all(each.grad is None for each in model.parameters())
        with zero.gathered(model):
            weights = {name: value.clone() for name, value in model.state_dict().items()}
        names = [name for name, each in model.named_parameters() if each.requires_grad]
        out.append((weights, zero.state_dict(model, optimizer), names))
    return out


@pytest.mark.parametrize("stage", [1, 3])
def test_states_of_experts_go_out_and_in(pool, stage):
    """Ranks have other numbers of trained experts, so that the n-th parameter is another on each."""
    model = model_of()
    for name, each in model.named_parameters():
        each.requires_grad_(each.requires_grad and ".experts.1." not in name)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)
    for step in range(4):
        for i in range(4):
            model.loss(*batch(i), 40).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2 == 0:
            continue
        names = [name for name, each in model.named_parameters() if each.requires_grad]
        states = {names[i]: each for i, each in optimizer.state_dict()["state"].items()}
        for outcome in pool(2).run(optimizers, stage) if step == 3 else ():
            weights, state, ours = outcome[1]
            for name, value in weights.items():
                torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-9, atol=1e-12)
            assert len(state["state"]) == len(ours)
            for i, each in state["state"].items():
                for kind, value in each.items():
                    torch.testing.assert_close(value, states[ours[i]][kind], rtol=1e-9, atol=1e-14)


def low(group, stage):
    """Steps that 16 bits would lose add up in the experts' float32 copies."""
    model = model_of(routing_bias=True).bfloat16()
    expert.cut(model, group)
    before = {name: value.clone() for name, value in model.state_dict().items() if ".experts." in name}
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, weight_decay=0.0)
    zero.shard(model, optimizer, group, stage)
    seen = []
    for _ in range(40):
        backward(group, model)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(sum((model.get_parameter(name) != value).sum().item() for name, value in before.items()))
    masters = zero.state_dict(model, optimizer)["state"].values()
    return seen[0], seen[-1], all(each["master"].dtype == torch.float32 for each in masters)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_experts_of_16_bits_have_copies_of_32(pool, stage):
    for first, last, masters in pool(2).run(low, stage):
        assert masters and last > 4 * max(first, 1), (first, last)


def one_has_nothing_to_train(group):
    """Nothing before the experts is trained, and of them the last alone, which the last rank has."""
    twin = expert.cut(model_of(), group)
    for name, parameter in twin.named_parameters():
        parameter.requires_grad_("mlp.experts.3." in name and name.startswith("layers.1."))
    data.replicate(twin, group)
    tokens = torch.randint(0, 31, (2, 6), generator=torch.Generator().manual_seed(group.rank()))
    twin.loss(tokens, tokens.roll(-1, 1), 24).backward()
    grads.finish(twin)
    return [float(p.grad.abs().sum()) for p in twin.parameters() if p.requires_grad]


def test_e1_a_rank_whose_experts_are_frozen_hands_gradients_back_all_the_same(pool):
    first, second = pool(2).run(one_has_nothing_to_train)
    assert first == [] and len(second) == 3 and min(second) > 0
