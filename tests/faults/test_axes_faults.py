"""Cuts put together in a way that computes something else, without a word unless someone looks: each is refused. And
what must not be: an empty batch, and ranks that end their texts at different times."""

import pytest
import torch

from shardlab.model import Transformer, initialise
from shardlab.parallel import context, data, expert, grads, mesh, tensor
from shardlab.specs import ModelSpec
from shardlab.specs.experts import Experts

SIZES = dict(hidden=16, layers=2, heads=4, kv_heads=2, head_dim=4, ffn=12, vocab=23)
MIXTURE = Experts(routed=4, active=2, ffn=6)


def model(experts=MIXTURE):
    return initialise(Transformer(ModelSpec(**SIZES, experts=experts)).double(), std=0.3)


def said(kind, call, *args):
    with pytest.raises(kind) as caught:
        call(*args)
    return str(caught.value)


def tokens(batch=2, seq=5, seed=0):
    return torch.randint(SIZES["vocab"], (batch, seq), generator=torch.Generator().manual_seed(seed))


def experts_first(group, etp):
    return said(ValueError, tensor.cut, expert.cut(model(), group), group, False, etp)


@pytest.mark.parametrize("etp", [None, 1])
def test_experts_are_spread_after_the_layers_are_cut(pool, etp):
    assert all("tensor.cut it before expert.cut" in each for each in pool(2).run(experts_first, etp))


def slices(group):
    axes = mesh.build(dp=2, tp=2)
    cut = tensor.cut(model(), axes.get_group("tp"))
    return [said(ValueError, expert.cut, cut, each) for each in (axes.get_group("tp"), group)]


def test_experts_are_not_spread_over_ranks_that_have_slices_of_them(pool):
    for rank, messages in enumerate(pool(4).run(slices)):
        assert messages[0].startswith(f"ranks {[0, 1] if rank < 2 else [2, 3]} have slices of the same experts")
        assert "etp=1" in messages[1]


def replicas_of_slices(group, how):
    axes = mesh.build(dp=2, tp=2)
    cut = tensor.cut(model(None), axes.get_group("tp"))
    if how == "context":
        context.cut(cut, axes.get_group("dp"))
    return said(ValueError, data.replicate, cut, group)


@pytest.mark.parametrize("how", ["", "context"])
def test_ranks_with_different_slices_are_no_replicas(pool, how):
    assert all("which parts it holds" in each for each in pool(4).run(replicas_of_slices, how))


def empty(group, sp):
    """Gradients of a batch and of one without a sequence, as the plain model has them; and logits of the latter."""
    plain, cut = model(), tensor.cut(model(), group, sp)
    for each in (plain, cut):
        for batch in (2, 0):
            each.loss(tokens(batch), tokens(batch, seed=1), 10).backward()
    grads.finish(cut)
    return (plain.norm.weight.grad - cut.norm.weight.grad).abs().max().item(), tuple(cut(tokens(0)).shape)


@pytest.mark.parametrize("sp", [False, "keep", "again"])
def test_a_batch_may_be_empty_on_a_tensor_axis(pool, sp):
    assert all(far < 1e-12 and shape == (0, 5, 23) for far, shape in pool(2).run(empty, sp))


def unfinished(group):
    cut = expert.cut(model(), group)
    cut.loss(tokens(seed=group.rank()), tokens(seed=3)).backward()
    return said(RuntimeError, grads.norm, cut)


def test_a_norm_of_experts_wants_a_data_axis_too(pool):
    assert all("data.replicate or zero.shard" in each for each in pool(2).run(unfinished))


def speak(group):
    plain = model()
    cut = expert.cut(model(), group)
    prompt = tokens(1, seed=group.rank())
    free = plain.generate(prompt, 9)
    never = min(set(range(SIZES["vocab"])) - set(free[0].tolist()))
    stop = int(free[0, 6]) if group.rank() else never  # one text ends early, the other does not
    said_by_plain, said_by_cut = (each.generate(prompt, 9, stop=stop) for each in (plain, cut))
    n = said_by_plain.shape[1]
    return torch.equal(said_by_plain, said_by_cut[:, :n]), bool((said_by_cut[:, n:] == stop).all()), n


def test_a_rank_whose_text_has_ended_stays_for_the_others(pool):
    outcomes = pool(2).run(speak)
    assert all(same and ends for same, ends, _ in outcomes)
    assert outcomes[1][2] < outcomes[0][2] == 14


@pytest.mark.parametrize("real", [torch.ones(5, 2, dtype=torch.bool), torch.ones(2, 5)])
def test_which_tokens_are_there_is_said_of_each(real):
    assert "`real` says of each token" in said(ValueError, model().loss, tokens(), tokens(), None, None, real)
