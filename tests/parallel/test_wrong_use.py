"""What readers do wrong with replicas and gradients: nothing of it is silent. What only looks wrong is right."""

import copy

import pytest
import torch
from torch import nn

from shardlab.model import Transformer, initialise
from shardlab.parallel import data, grads, tensor, zero
from shardlab.parallel.loss import valid_tokens
from shardlab.specs import ModelSpec

SIZES = dict(hidden=16, layers=2, heads=4, kv_heads=2, head_dim=4, ffn=22, vocab=64, tied=True)


def build(seed=0, **sizes):
    return initialise(Transformer(ModelSpec(**(SIZES | sizes))), seed=seed).double()


def batch(rank):
    tokens = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(rank))
    return tokens, tokens.roll(-1, 1)


def backward(model, *ranks):
    for rank in ranks:
        model.loss(*batch(rank), 32).backward()


def said(error, call, *args):
    with pytest.raises(error) as caught:
        call(*args)
    return str(caught.value)


def apart(ours, theirs):
    pairs = [(p.grad, q.grad) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True)]
    return max((p - q).abs().max().item() for p, q in pairs)


def frozen(model, name):
    model.get_parameter(name).requires_grad_(False)
    return model


DIFFER = {
    "shapes": (lambda rank: build(ffn=22 + rank), "20 tensors, 20 trained"),
    "depth": (lambda rank: build(layers=2 + rank), "29 tensors, 29 trained"),
    "dtypes": (lambda rank: build().to((torch.float64, torch.float32)[rank]), "20 tensors, 20 trained"),
    "frozen": (lambda rank: frozen(build(), f"layers.{rank}.self_attn.q_proj.weight"), "20 tensors, 19 trained"),
}


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("differ", DIFFER)
def test_ranks_whose_models_differ_are_told_so(pool, differ, stage):
    make, numbers = DIFFER[differ]

    def cut(group):
        model = make(group.rank())
        if stage == 0:
            return said(ValueError, data.replicate, model, group)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return said(ValueError, zero.shard, model, torch.optim.SGD(trained), group, stage)

    first, second = pool(2).run(cut)
    assert first == second and numbers in first
    assert first.startswith("rank 1 has another model than rank 0, in names, shapes, dtypes, in what is "
                            "frozen or which parts it holds: ")


def without_valid(group, stage):
    model = build()
    if stage:
        zero.shard(model, torch.optim.SGD(model.parameters()), group, stage)
    else:
        data.replicate(model, group)
    evaluated = model.loss(*batch(0)).item()
    text = said(ValueError, model.loss(*batch(group.rank())).backward)
    model.loss(*batch(group.rank()), valid_tokens([batch(group.rank())[1]], group)).backward()
    grads.finish(model)
    return evaluated, text, grads.norm(model).item()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_loss_that_is_one_ranks_mean_is_refused_in_backward(pool, stage):
    plain = build()
    right = plain.loss(*batch(0)).item()
    backward(plain, 0, 1)
    for evaluated, text, norm in pool(2).run(without_valid, stage):
        assert evaluated == pytest.approx(right, abs=1e-12)
        assert "summed over 2 ranks" in text and "valid = loss.valid_tokens([labels], group)" in text
        assert norm == pytest.approx(grads.norm(plain).item(), abs=1e-12)


def test_one_replica_may_take_its_own_mean(pool):
    assert pool(1).run(lambda group: data.replicate(build(), group).loss(*batch(0)).backward()) == [None]


def in_parts(group):
    """Under sequence parallelism each rank has a part of the norms' gradients: `finish` left out, and called twice."""
    model = tensor.cut(build(), group, sequence_parallel="keep")
    backward(model, 0)
    forgotten = said(RuntimeError, grads.clip_grad_norm_, model, 1.0)
    grads.finish(model)
    twice = said(RuntimeError, grads.finish, model)
    model.zero_grad()
    backward(model, 0)
    grads.finish(model)
    plain = build()
    backward(plain, 0)
    return forgotten, twice, (model.norm.weight.grad - plain.norm.weight.grad).abs().max().item()


def test_finish_is_called_once_a_step_under_sequence_parallelism(pool):
    for forgotten, twice, distance in pool(2).run(in_parts):
        assert "a part of the gradient of layers.0.input_layernorm.weight: call grads.finish(model) first" in forgotten
        assert "layers.0.input_layernorm.weight is summed already: call grads.finish once a step" in twice
        assert distance < 1e-12


def changed(group, how):
    model = frozen(build(), "norm.weight")
    data.replicate(model, group)
    how(model, group)
    backward(model, group.rank())
    return said(RuntimeError, grads.finish, model)


CHANGES = {
    "thawed": (lambda model, group: model.norm.weight.requires_grad_(True), "norm.weight"),
    "added": (lambda model, group: setattr(model.layers[0].mlp.down_proj, "bias", nn.Parameter(
        torch.zeros(16, dtype=torch.float64))), "layers.0.mlp.down_proj.bias"),
    "assigned": (lambda model, group: model.load_state_dict(build(1).state_dict(), assign=True), "embed_tokens.weight"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_parameters_that_replicate_has_not_seen_are_refused(pool, change):
    how, name = CHANGES[change]
    for text in pool(2).run(changed, how):
        assert text.startswith(f"the gradient of {name} is not summed over ranks: it is new, or was frozen")


def looks_wrong(group):
    """Every pass inside no_sync and no other; an optimizer made before; a parameter frozen after."""
    plain, model = build(), build(group.rank())
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (plain, model)]
    data.replicate(model, group)
    with data.no_sync(model):
        backward(model, group.rank(), group.rank() + 2)
        grads.finish(model)
    backward(plain, *range(4))
    first = apart(model, plain)
    for each in (plain, model):
        each.norm.weight.requires_grad_(False)
        each.norm.weight.grad = None
    for each in optimizers:
        each.step()
        each.zero_grad()
    backward(model, group.rank())
    grads.finish(model)
    kept = model.norm.weight.grad is None and bool((model.norm.weight == 1).all())
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return first, kept, max((p - q).abs().max().item() for p, q in pairs)


def test_what_only_looks_wrong_is_right(pool):
    for first, kept, weights in pool(2).run(looks_wrong):
        assert first < 1e-12 and kept and weights < 1e-9


def test_no_sync_is_for_a_plain_model_too():
    model, twin = build(), build()
    with data.no_sync(model):
        backward(model, 0)
    backward(twin, 0)
    assert apart(model, twin) == 0


def moved(group, stage):
    """What is said where parameters would leave their rows; what changes nothing is let through."""
    model = build()
    zero.shard(model, torch.optim.SGD(model.parameters()), group, stage) if stage else data.replicate(model, group)
    model.to("cpu").double().train()
    return [said(RuntimeError, call) for call in (model.float, lambda: model.to(torch.bfloat16),
                                                  lambda: copy.deepcopy(model))]


@pytest.mark.parametrize("stage", range(4))
def test_a_model_with_a_data_axis_is_not_converted_and_not_copied(pool, stage):
    for converted, low, copied in pool(2).run(moved, stage):
        assert converted == low and "before it is replicated or sharded" in converted and "copy the plain" in copied
