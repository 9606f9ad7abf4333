"""Float32 master copies of 16-bit weights without ZeRO: what is stepped, what is kept, and nothing small is lost."""

import copy
from functools import partial

import pytest
import torch

from shardlab.model import Transformer, initialise
from shardlab.parallel import layout, masters, zero
from shardlab.specs import Experts, Layout, ModelSpec
from shardlab.train import Batches, text, train

SIZES = dict(hidden=16, layers=2, heads=4, kv_heads=2, head_dim=4, ffn=22, vocab=256, tied=True)
ADAMW = partial(torch.optim.AdamW, lr=2e-4, weight_decay=0.1)


def plain(dtype=torch.bfloat16, experts=False, frozen=False):
    spec = ModelSpec(**SIZES, experts=Experts(routed=4, active=2, ffn=11) if experts else None)
    model = initialise(Transformer(spec), seed=3, std=0.1).to(dtype)
    if frozen:
        model.embed_tokens.weight.requires_grad_(False)
    return model


def batches(parts=1):
    return Batches(text()[:2000], seq=16, batch=8, accumulation=parts, seed=1)


def moved(model, start):
    pairs = zip(model.parameters(), start, strict=True)
    return [(mine.detach().float() - its.float()).abs().mean().item() for mine, its in pairs]


def test_small_updates_are_not_lost():
    """At this rate bf16 alone stands still where weights are large; with copies it goes where fp32 goes."""
    seen = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("masters", torch.bfloat16)):
        model = plain(torch.bfloat16).to(dtype)  # one start for all, without a rounding between them
        optimizer = ADAMW(model.parameters(), lr=5e-5)
        if name == "masters":
            assert masters.keep(model, optimizer) is model
        steps = train(model, optimizer, batches(), range(30), progress=False, max_norm=1.0)
        seen[name] = steps[-1].loss, model.norm.weight.detach().float() - 1, steps
    assert (seen["bf16"][1] == 0).all() and (seen["fp32"][1] != 0).all()  # 1 ± 5e-5 is 1 in bf16
    assert abs(seen["masters"][0] - seen["fp32"][0]) < 0.01 < abs(seen["bf16"][0] - seen["fp32"][0])
    for (*_, ours), (*_, known) in [(seen["masters"], seen["fp32"])]:
        for mine, its in zip(ours, known, strict=True):
            assert abs(mine.norm / its.norm - 1) < 0.03


class Watched:
    """Beside an optimizer with masters one of float32 weights of its own, stepped with the same clipped gradients."""

    def __init__(self, model, optimizer):
        kept = model.masters
        self.of = {each: mine.detach().clone().requires_grad_() for each, mine in kept.stepped.items()}
        self.own = ADAMW([self.of[each] for group in kept.order for each in group if each.requires_grad])
        self.kept, self.same = kept, True
        optimizer.register_step_pre_hook(self.before)
        optimizer.register_step_post_hook(self.after)

    def before(self, *_):
        for each, mine in self.of.items():
            mine.grad = None if each.grad is None else each.grad.float()

    @torch.no_grad()
    def after(self, *_):
        self.own.step()
        for each, mine in self.of.items():
            stepped = self.kept.stepped[each]
            self.same &= torch.equal(stepped, mine) and torch.equal(each, mine.to(each.dtype))
            self.same &= stepped.dtype == torch.float32 or not each.requires_grad


LAYOUTS = {"tp": Layout(2), "dp": Layout(dp=2), "pp": Layout(pp=2, microbatches=2), "cp": Layout(cp=2),
           "ep": Layout(dp=2, ep=2)}


def trained(group, frozen):
    out = {}
    for name, each in LAYOUTS.items():
        model = plain(experts=name == "ep", frozen=frozen)
        cut = layout.cut(model, each, ADAMW)
        watched = Watched(cut.model, cut.optimizer)
        steps = train(cut.model, cut.optimizer, batches(each.microbatches), range(4), cut.axes.data, 0.5, False,
                      each.orders)
        states = cut.optimizer.state_dict()["state"].values()
        fine = any((s["master"] != s["master"].bfloat16()).any() for s in states if "master" in s)
        out[name] = watched.same, fine, len(watched.own.state), steps
    return out


@pytest.mark.parametrize("frozen", [False, True])
def test_under_every_cut_the_copies_take_the_clipped_gradients_and_the_weights_are_they_rounded(pool, frozen):
    known = {}
    for experts in (False, True):
        model = plain(torch.float32, experts, frozen)
        known[experts] = train(model, ADAMW([p for p in model.parameters() if p.requires_grad]), batches(), range(4),
                               progress=False, max_norm=0.5)
    for told in pool(2).run(trained, frozen):
        for name, (same, fine, stepped, steps) in told.items():
            assert same and fine and stepped > 8, name
            for mine, its in zip(steps, known[name == "ep"], strict=True):
                assert abs(mine.loss - its.loss) < 0.05 and abs(mine.norm / its.norm - 1) < 0.05, (name, mine, its)


def test_states_have_the_copies_and_go_into_zero_and_back(pool):
    model = plain()
    optimizer = ADAMW(model.parameters())
    masters.keep(model, optimizer)
    assert all(set(each) == {"master"} for each in optimizer.state_dict()["state"].values())  # before the first step
    steps = train(model, optimizer, batches(), range(6), progress=False)
    state = copy.deepcopy(optimizer.state_dict())
    assert all(set(each) == {"step", "exp_avg", "exp_avg_sq", "master"} for each in state["state"].values())
    other = plain().requires_grad_()
    its = ADAMW(other.parameters())
    masters.keep(other, its)
    its.load_state_dict(state)
    assert all(map(torch.equal, other.parameters(), model.parameters()))
    assert train(other, its, batches(), range(6, 8), progress=False) == train(
        model, optimizer, batches(), range(6, 8), progress=False)
    assert steps[0].loss > steps[-1].loss
    for same, loaded in pool(2).run(through_zero, state):
        assert same and loaded


def through_zero(group, state):
    model = plain()
    optimizer = ADAMW(model.parameters())
    zero.shard(model, optimizer, group, 1)
    zero.load_state_dict(model, optimizer, state)
    back = zero.state_dict(model, optimizer)["state"]
    same = all(torch.equal(back[i][name], value) for i, each in state["state"].items() for name, value in each.items())
    return same, all(map(torch.equal, model.parameters(), (state["state"][i]["master"].bfloat16() for i in back)))


def test_copies_follow_weights_that_are_loaded_and_keep_what_16_bits_cannot_hold():
    model = plain()
    optimizer = ADAMW(model.parameters())
    masters.keep(model, optimizer)
    train(model, optimizer, batches(), range(2), progress=False)
    before = [each["master"].clone() for each in optimizer.state_dict()["state"].values()]
    model.load_state_dict(model.state_dict())  # the same ones
    assert all(map(torch.equal, before, (s["master"] for s in optimizer.state_dict()["state"].values())))
    fresh = plain()
    model.load_state_dict(fresh.state_dict())
    train(model, optimizer, batches(), range(1), progress=False)
    assert max(moved(model, fresh.parameters())) < 1e-3  # from there, one small step


def test_weights_of_32_bits_are_stepped_as_they_are_and_gradients_go():
    model = plain()
    model.norm.float()
    optimizer = ADAMW(model.parameters())
    masters.keep(model, optimizer)
    assert model.masters.stepped[model.norm.weight] is model.norm.weight
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    optimizer.step()
    optimizer.zero_grad()
    assert all(each.grad is None and mine.grad is None for each, mine in model.masters.stepped.items())


def test_what_does_not_go_together_is_refused():
    model, other = plain(), plain()
    optimizer = ADAMW(model.parameters())
    with pytest.raises(ValueError, match="has 20 parameters that the model has not"):
        masters.keep(other, optimizer)
    masters.keep(model, optimizer)
    with pytest.raises(ValueError, match="has float32 copies already"):
        masters.keep(model, optimizer)
    with pytest.raises(RuntimeError, match="takes no closure"):
        optimizer.step(lambda: None)
    with torch.device("meta"):
        empty = Transformer(ModelSpec(**SIZES)).bfloat16()
    with pytest.raises(ValueError, match="nothing to copy on the meta device"):
        masters.keep(empty, ADAMW(empty.parameters()))
    begun = ADAMW(other.parameters())
    train(other, begun, batches(), range(1), progress=False)
    with pytest.raises(ValueError, match="this AdamW has begun"):
        masters.keep(other, begun)
    late = plain(frozen=True)
    optimizer = ADAMW(late.parameters())
    masters.keep(late, optimizer)
    late.requires_grad_()
    with pytest.raises(RuntimeError, match="was frozen when masters were kept"):
        train(late, optimizer, batches(), range(1), progress=False)
