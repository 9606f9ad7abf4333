"""One norm for every cut: each number counts once, all ranks agree, and what one rank has that is not finite all know.

The plain twin's gradients and `torch.nn.utils.clip_grad_norm_` on them are what is right.
"""

import math

import pytest
import torch
from torch import nn

from shardlab import comm
from shardlab.model.parameters import distinct
from shardlab.model.transformer import Transformer
from shardlab.parallel import data, grads, mesh, tensor
from shardlab.parallel.shard import take
from shardlab.specs import ModelSpec

SIZES = dict(hidden=24, layers=2, heads=12, kv_heads=4, head_dim=4, ffn=30, vocab=101, attention_bias=True)
FROZEN = "layers.0.mlp.up_proj.weight"
UNUSED = "layers.1.spare"  # a parameter that no forward pass uses


def plain(**sizes):
    torch.manual_seed(0)
    model = Transformer(ModelSpec(**(SIZES | sizes))).double()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.layers[1].spare = nn.Parameter(torch.ones(3, dtype=torch.float64))
    model.get_parameter(FROZEN).requires_grad_(False)
    return model


def by_data(model, group):
    return data.replicate(model, group), group


def by_tensor(model, group):
    return tensor.cut(model, group), None


def by_sequence(model, group):
    return tensor.cut(model, group, sequence_parallel="keep"), None


def by_both(model, group):
    axes = mesh.build(dp=2, tp=2)
    return data.replicate(tensor.cut(model, axes.get_group("tp")), axes.get_group("dp")), axes.get_group("dp")


def batch():
    tokens = torch.randint(0, 101, (4, 8), generator=torch.Generator().manual_seed(5))
    labels = tokens.roll(-1, 1)
    labels[1, 2:] = -100
    return tokens, labels, int((labels != -100).sum())


def backward(model, axis=None):
    """The gradients of the whole batch: all of it here, or this rank's part of it. 4 sequences on 3 ranks: 2, 2, 0."""
    tokens, labels, valid = batch()
    if axis is None:
        model.loss(tokens, labels, valid).backward()
    elif axis.rank() * 2 < 4 or axis.size() == 2:
        rows = slice(axis.rank() * 2, axis.rank() * 2 + 2)
        model.loss(tokens[rows], labels[rows], valid).backward()


def apart(model, whole):
    """The largest distance of a gradient held here from this rank's part of the plain model's."""
    most = 0.0
    for name, parameter in model.named_parameters():
        theirs = whole[name]
        assert (parameter.grad is None) == (theirs is None), name
        if theirs is not None:
            window = getattr(parameter, "window", None)
            mine = theirs if window is None else take(theirs, window, parameter.shape[window.dim])
            most = max(most, (parameter.grad - mine).abs().max().item())
    return most


KINDS = {"separate head": {}, "tied": dict(tied=True), "copies of KV heads": dict(kv_heads=1, qk_norm=True)}
NORMS = (1.0, 2.0, 3.0, math.inf)


def clipped(group, cut, sizes):
    """For each kind of norm: the norm, and how far the clipped gradients are from PyTorch's of the plain twin."""
    twin = plain(**sizes)
    model, axis = cut(plain(**sizes), group)
    backward(twin)
    backward(model, axis)
    grads.finish(model)
    results = []
    for norm_type in NORMS:  # one after the other, of what the one before has left
        most = 0.3 * grads.norm(model, norm_type).item()
        right = torch.nn.utils.clip_grad_norm_(twin.parameters(), most, norm_type)
        ours = grads.clip_grad_norm_(model, most, norm_type)
        after = grads.norm(model, norm_type)
        results.append((ours.item(), abs(ours / right - 1).item(), abs(after / most * (1 + 1e-6 / ours) - 1).item(),
                        apart(model, {name: p.grad for name, p in twin.named_parameters()})))
    return results


CUTS = [(by_data, 2), (by_data, 3), (by_data, 4), (by_tensor, 2), (by_tensor, 4), (by_sequence, 2), (by_sequence, 4),
        (by_both, 4)]


@pytest.mark.parametrize("sizes", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("cut,p", [pytest.param(cut, p, id=f"{cut.__name__}-{p}") for cut, p in CUTS])
def test_norm_and_clipping_are_those_of_the_whole_model(pool, cut, p, sizes):
    ranks = pool(p).run(clipped, cut, sizes)
    assert len({tuple(norm for norm, *_ in told) for told in ranks}) == 1  # to the last bit
    for told in ranks:
        for _, norm, after, gradients in told:
            assert norm < 1e-12 and after < 1e-12 and gradients < 1e-12


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_kv_head_that_ranks_share_counts_once(pool, kv_heads):
    def counted(group):
        model = tensor.cut(plain(kv_heads=kv_heads), group)
        for parameter in model.parameters():
            if parameter.requires_grad:
                window = getattr(parameter, "window", None)
                parameter.grad = parameter.detach().new_zeros(parameter.shape)
                held = parameter.grad if window is None else parameter.grad.narrow(
                    window.dim, 0, window.stop - window.start)
                held[:] = 1
                parameter.grad.finished = True
        return grads.norm(model, 1.0).item()

    numbers = sum(p.numel() for _, p in distinct(plain(kv_heads=kv_heads)) if p.requires_grad)
    assert pool(4).run(counted) == [numbers] * 4


def loose(group, cut, most):
    """Whether clipping to `most` leaves the gradients as they are, bit for bit."""
    model, axis = cut(plain(), group)
    backward(model, axis)
    grads.finish(model)
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    grads.clip_grad_norm_(model, most)
    return all(was is None or torch.equal(was, p.grad) for was, p in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("most", [1e3, math.inf])
def test_clipping_to_more_than_the_norm_changes_no_bit(pool, most):
    assert pool(4).run(loose, by_both, most) == [True] * 4


def spoiled(group, cut, where, name):
    """What clipping gives and says when one rank has had a gradient that is not finite: for each number and norm."""
    told = []
    for bad in (math.nan, math.inf, -math.inf):
        model, axis = cut(plain(qk_norm=True), group)
        if group.rank() == where:
            last = torch.zeros_like(model.get_parameter(name))
            last.view(-1)[-1] = bad
            model.get_parameter(name).register_hook(last.add)
        backward(model, axis)
        grads.finish(model)
        held = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        for norm_type in (2.0, math.inf):
            norm = grads.clip_grad_norm_(model, 1.0, norm_type, error_if_nonfinite=False).item()
            same = all(torch.equal(held[name].nan_to_num(7), model.get_parameter(name).grad.nan_to_num(7))
                       for name in held)
            with pytest.raises(FloatingPointError) as error:
                grads.clip_grad_norm_(model, 1.0, norm_type)
            told.append((str(norm), same, str(error.value)))
    return told


HERE = [(0, "norm.weight"), (-1, "norm.weight"), (1, "layers.0.self_attn.q_norm.weight"),
        (2, "layers.1.self_attn.q_proj.bias"), (3, "lm_head.weight")]  # the second: a copy that does not count


@pytest.mark.parametrize("where,name", HERE)
@pytest.mark.parametrize("cut,p", [(by_data, 2), (by_tensor, 2), (by_sequence, 2), (by_both, 4)])
def test_all_ranks_raise_or_skip_when_one_has_a_gradient_that_is_not_finite(pool, cut, p, where, name):
    ranks = pool(p).run(spoiled, cut, where % p, name)
    for of_ranks in zip(*ranks, strict=True):
        assert len({norm for norm, _, _ in of_ranks}) == 1
        for norm, same, said in of_ranks:
            assert norm in ("nan", "inf") and same
            assert said.startswith(f"the norm of the gradients is {norm}; not finite on this rank: ")
        assert f"not finite on this rank: {name}. " in of_ranks[where % p][2]


def test_the_message_names_five_and_no_rank_names_what_it_does_not_hold(pool):
    def many(group):
        model = tensor.cut(plain(), group)
        backward(model)
        for parameter in model.parameters():
            if group.rank() == 1 and parameter.grad is not None:
                parameter.grad[:] = math.nan
        grads.finish(model)
        with pytest.raises(FloatingPointError) as error:
            grads.clip_grad_norm_(model, 1.0)
        return str(error.value)

    first, second = pool(2).run(many)
    assert first == ("the norm of the gradients is nan; not finite on this rank: none. Lower the learning rate, or "
                     "skip the step: error_if_nonfinite=False")
    assert second.count(".weight") + second.count(".bias") == 5 and " …. Lower" in second


def without(group):
    """The norm where rank 1 holds no gradient at all, and where no rank holds one."""
    model = tensor.cut(plain(), group)
    nothing = grads.norm(model).item()
    if group.rank() == 0:
        model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    return nothing, grads.norm(model).item() ** 2, model.lm_head.weight.numel()


def test_a_rank_that_holds_no_gradient_takes_part(pool):
    ranks = pool(2).run(without)
    for nothing, square, _ in ranks:
        assert nothing == 0 and abs(square - ranks[0][2]) < 1e-9


def test_frozen_and_unused_parameters_have_no_gradient_and_count_nothing(pool):
    def held(group):
        model, axis = by_both(plain(tied=True), group)
        backward(model, axis)
        grads.finish(model)
        return [piece.name for piece in grads.pieces(model)], [name for name, _ in model.named_parameters()]

    for counted, names in pool(4).run(held):
        assert set(names) - set(counted) == {FROZEN, UNUSED} and len(counted) == len(set(counted))
        assert "lm_head.weight" not in counted  # its other name counts


@pytest.mark.parametrize("cut,p,calls", [(by_data, 2, 0), (by_tensor, 2, 1), (by_both, 4, 1)])
def test_the_norm_takes_one_number_an_axis_that_cuts(pool, cut, p, calls):
    def moved(group):
        model, axis = cut(plain(), group)
        backward(model, axis)
        grads.finish(model)
        with comm.record() as ledger:
            grads.norm(model)
        return [(entry.op, entry.payload, entry.axis) for entry in ledger.entries]

    axis = "tp" if cut is by_both else "world"
    assert pool(p).run(moved) == [[("all_reduce", 8, axis)] * calls] * p


@pytest.mark.parametrize("norm_type,right", [(1.0, 7), (2.0, 5), (3.0, 91 ** (1 / 3)), (math.inf, 4)])
def test_norms_by_hand(norm_type, right):
    model = nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[3.0, -4.0]])
    assert grads.norm(model, norm_type).item() == pytest.approx(right, rel=1e-6)


def test_a_sum_over_millions_of_numbers_is_right_to_seven_digits():
    model = nn.Linear(2500, 1000, bias=False)
    model.weight.grad = torch.randn(1000, 2500, generator=torch.Generator().manual_seed(0)) + 3
    for p in (1.0, 2.0):
        right = torch.linalg.vector_norm(model.weight.grad.double(), p)
        assert abs(grads.norm(model, p) / right - 1) < 1e-7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_more(dtype):
    model = nn.Linear(300, 1000, bias=False).to(dtype)
    model.weight.grad = torch.full_like(model.weight, 0.5)
    assert abs(grads.norm(model) - 0.5 * 300_000**0.5) < 1e-4 and grads.norm(model, math.inf) == 0.5


@pytest.mark.parametrize("norm_type", [0.5, 0, -math.inf, math.nan])
def test_a_norm_that_is_none_is_refused(norm_type):
    with pytest.raises(ValueError, match="give a number from 1, or inf"):
        grads.norm(nn.Linear(2, 2), norm_type)


@pytest.mark.parametrize("max_norm", [0, -1.0, math.nan])
def test_a_largest_norm_that_is_none_is_refused(max_norm):
    with pytest.raises(ValueError, match="give a number above 0"):
        grads.clip_grad_norm_(nn.Linear(2, 2), max_norm)


def test_a_model_without_gradients_has_norm_0():
    assert grads.norm(nn.Linear(2, 2)) == grads.norm(nn.ReLU()) == grads.norm(nn.Linear(2, 2), math.inf) == 0
    assert grads.clip_grad_norm_(nn.Linear(2, 2).requires_grad_(False), 1.0) == 0
