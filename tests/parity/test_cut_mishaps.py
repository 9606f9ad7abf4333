"""What a reader may do to a cut model that would go wrong without a word: each is refused, or does what is right."""

import gc
import weakref

import pytest
import torch

from shardlab import comm
from shardlab.model import Transformer, initialise
from shardlab.parallel import data, grads, tensor, weights, zero
from shardlab.specs import ModelSpec

SPEC = ModelSpec(hidden=16, layers=2, heads=4, kv_heads=2, head_dim=4, ffn=29, vocab=53, qk_norm=True)


def model_of(hidden=16):
    torch.manual_seed(0)
    return Transformer(ModelSpec(**{**vars(SPEC), "hidden": hidden}) if hidden != 16 else SPEC)


def tokens(rank=0):
    return (torch.arange(14).view(2, 7) + 11 * rank) % 53, (torch.arange(14).view(2, 7) * 3 + rank) % 53


def cut(model, group, stage, kind=torch.optim.AdamW):
    optimizer = kind(model.parameters(), lr=0.01)
    if stage:
        zero.shard(model, optimizer, group, stage)
    else:
        data.replicate(model, group)
    return optimizer


def without_finish(group):
    model = model_of()
    optimizer = cut(model, group, 0)
    model.loss(*tokens(group.rank()), 28).backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"call grads\.finish\(model\) before optimizer\.step"):
        model.loss(*tokens(group.rank()), 28).backward()


def test_a_step_without_finish_is_told_by_the_next_backward(pool):
    pool(2).run(without_finish)


def freed(group, stage, transport):
    with comm.use(transport=transport):
        model = model_of()
        optimizer = cut(model, group, stage)
        model.loss(*tokens(group.rank()), 28).backward()
        grads.finish(model)
        optimizer.step()
        optimizer.zero_grad()
        known = [weakref.ref(parameter) for parameter in model.parameters()] + [weakref.ref(model.reducer)]
        del model, optimizer
        gc.collect()
    return sum(each() is not None for each in known)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_cut_model_that_is_dropped_gives_its_memory_back(pool, stage):
    assert pool(2).run(freed, stage, "shm") == [0, 0]


def thrown_away(group, stage):
    model = model_of()
    cut(model, group, stage)
    norms = []
    for _ in range(2):
        model.loss(*tokens(group.rank()), 28).backward()
        if not norms:
            model.zero_grad()
            model.loss(*tokens(group.rank()), 28).backward()
        grads.finish(model)
        norms.append(grads.norm(model).item())
        model.zero_grad()
    return norms


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_models_own_zero_grad_throws_all_gradients_away(pool, stage):
    for first, second in pool(2).run(thrown_away, stage):
        assert first == pytest.approx(second, rel=1e-6)


def added_to(group):
    model = tensor.cut(model_of(), group)
    model.loss(*tokens()).backward()
    grads.finish(model)
    model.loss(*tokens()).backward()
    with pytest.raises(RuntimeError, match=r"is summed already: call grads\.finish once a step, and zero_grad"):
        grads.finish(model)


def test_gradients_that_were_finished_are_not_added_to(pool):
    pool(2).run(added_to)


def states(group, stage):
    model = model_of()
    optimizer = cut(model, group, stage)
    other = torch.optim.AdamW(model_of(8).parameters())
    for group_ in other.param_groups:
        for parameter in group_["params"]:
            parameter.grad = torch.zeros_like(parameter)
    other.step()
    with pytest.raises(ValueError, match=r"8,?\), the parameter \(.*16,?\): these are the states of another"):
        zero.load_state_dict(model, optimizer, other.state_dict())
    for wrong in (optimizer.state_dict, lambda: optimizer.load_state_dict({"state": {}, "param_groups": []})):
        with pytest.raises(RuntimeError, match=r"zero\.state_dict\(model, optimizer\) gives"):
            wrong()
    with pytest.raises(RuntimeError, match="takes no closure"):
        optimizer.step(lambda: model.loss(*tokens(), 28))
    with pytest.raises(ValueError, match="initialise the plain model, then cut it"):
        initialise(model)
    return True


@pytest.mark.parametrize("stage", [1, 3])
def test_states_of_another_model_and_calls_past_the_library_are_refused(pool, stage):
    assert all(pool(2).run(states, stage))


def filled_inside(group, folder):
    model = model_of()
    cut(model, group, 3)
    weights.save(model, folder)
    with zero.gathered(model), pytest.raises(RuntimeError, match="fill the slices outside of it"):
        weights.load(model, folder)


def test_slices_are_not_filled_where_the_whole_counts(pool, tmp_path):
    pool(2).run(filled_inside, tmp_path / "saved")
