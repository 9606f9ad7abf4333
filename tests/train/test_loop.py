"""The same short run on real text, in one process and under every cut: the same losses, norms and weights."""

import contextlib
import io
import math

import pytest
import torch

from shardlab.model import Transformer, initialise
from shardlab.parallel import data, mesh, pipeline, tensor, zero
from shardlab.parallel.shard import take
from shardlab.schedule import forward_only, one_f_one_b
from shardlab.specs import ModelSpec
from shardlab.train import Batches, step, text, train

SPEC = ModelSpec(hidden=16, layers=2, heads=4, kv_heads=2, head_dim=4, ffn=22, vocab=256, tied=True)
ORDERS = one_f_one_b(2, 3)
STEPS = range(20)  # over the end of an epoch, whose last step has 6 sequences, not 7


def batches():
    return Batches(text()[:2000], seq=16, batch=7, accumulation=3, seed=1)


def plain():
    return initialise(Transformer(SPEC), seed=3).double()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.02)


@pytest.fixture(scope="module")
def alone():
    """The run of the plain model, in a process that has no process group: its steps and its weights after them."""
    model = plain()
    steps = train(model, adamw(model), batches(), STEPS, progress=False)
    return steps, model.state_dict()


def test_the_loss_of_the_text_falls(alone):
    steps, _ = alone
    assert abs(steps[0].loss - math.log(256)) < 0.1 and steps[-1].loss < 3.6
    assert sum(s.tokens for s in steps[:18]) == 1999 and min(s.tokens for s in steps) < 7 * 16  # an epoch, its end


# a cut: the plain model and its optimizer → the cut model, its optimizer, the group of its data axis


def by_data(group):
    model = data.replicate(plain(), group)
    return model, adamw(model), group


def by_tensor(group):
    model = tensor.cut(plain(), group)
    return model, adamw(model), None


def by_sequence(group):
    model = tensor.cut(plain(), group, sequence_parallel="again")
    return model, adamw(model), None


def by_zero(stage):
    def cut(group):
        model = plain()
        optimizer = adamw(model)
        return zero.shard(model, optimizer, group, stage), optimizer, group

    return cut


def by_both(group):
    axes = mesh.build(dp=2, tp=2)
    model = data.replicate(tensor.cut(plain(), axes.get_group("tp")), axes.get_group("dp"))
    return model, adamw(model), axes.get_group("dp")


def by_all(group):
    axes = mesh.build(dp=2, tp=2)
    model = tensor.cut(plain(), axes.get_group("tp"), sequence_parallel="keep")
    optimizer = adamw(model)
    return zero.shard(model, optimizer, axes.get_group("dp"), 3), optimizer, axes.get_group("dp")


def by_pipeline(group):
    axes = mesh.build(dp=group.size() // 2, pp=2)
    model = pipeline.cut(plain(), axes.get_group("pp"), ORDERS)
    return data.replicate(model, axes.get_group("dp")), adamw(model), axes.get_group("dp")


CUTS = {
    "data": (by_data, 2, 3, 4), "tensor": (by_tensor, 2, 4), "sequence": (by_sequence, 2),
    "data × tensor": (by_both, 4),
    "ZeRO-1": (by_zero(1), 2, 3), "ZeRO-2": (by_zero(2), 2, 3), "ZeRO-3": (by_zero(3), 2, 3),
    "ZeRO-3 × sequence": (by_all, 4), "pipeline": (by_pipeline, 2), "data × pipeline": (by_pipeline, 4),
}
RUNS = [pytest.param(cut, p, id=f"{name}-{p}", marks=[pytest.mark.more] * (p < worlds[-1]))
        for name, (cut, *worlds) in CUTS.items() for p in worlds]


def schedule_of(model):
    return ORDERS if hasattr(model, "pipeline") else None


def run(group, cut, weights):
    """The run under a cut: its steps, and the largest distance of a weight from the plain run's."""
    model, optimizer, axis = cut(group)
    steps = train(model, optimizer, batches(), STEPS, axis, progress=False, orders=schedule_of(model))
    most = 0.0
    with zero.gathered(model):
        for name, parameter in model.named_parameters():
            window, whole = getattr(parameter, "window", None), weights[name]
            mine = whole if window is None else take(whole, window, parameter.shape[window.dim])
            most = max(most, (parameter.detach() - mine).abs().max().item())
    return steps, most


@pytest.mark.parametrize("cut,p", RUNS)
def test_a_run_under_a_cut_is_the_plain_run(pool, alone, cut, p):
    steps, weights = alone
    ranks = pool(p).run(run, cut, weights)
    assert len({tuple(told) for told, _ in ranks}) == 1  # to the last bit, on all ranks
    for told, distance in ranks:
        assert distance < 1e-9
        for ours, theirs in zip(told, steps, strict=True):
            assert ours.tokens == theirs.tokens
            assert abs(ours.loss - theirs.loss) < 1e-9 and abs(ours.norm - theirs.norm) < 1e-9


def ragged(step, coordinate, size):
    """Ranks and micro-batches that differ in shape and in labels: 1 sequence of 7 labels, or 5 of 1 (FAULTS D5, D8)."""
    generator = torch.Generator().manual_seed(step)
    parts = []
    for i in range(4):
        tokens = torch.randint(0, 256, (1 + 4 * (i % 2), 8), generator=generator)
        labels = torch.randint(0, 256, tokens.shape, generator=generator)
        labels[:, 7 if i % 2 == 0 else 1 :] = -100
        parts.append((tokens, labels))
    return parts[coordinate::size]


def ragged_run(group=None):
    model = plain() if group is None else data.replicate(plain(), group)
    steps = train(model, adamw(model), ragged, range(4), group, progress=False)
    return steps, model.lm_head.weight.detach()


@pytest.mark.parametrize("p", [2, 3])  # with 3, a rank that accumulates beside two that do not
def test_tokens_weigh_the_same_on_every_rank(pool, p):
    (plain_steps, plain_weight), ranks = ragged_run(), pool(p).run(ragged_run)
    assert {s.tokens for s in plain_steps} == {2 * 7 + 2 * 5}
    for steps, weight in ranks:
        told = [torch.tensor([(s.loss, s.norm, s.tokens) for s in each]) for each in (steps, plain_steps)]
        torch.testing.assert_close(*told, rtol=0, atol=1e-9)
        torch.testing.assert_close(weight, plain_weight, rtol=0, atol=1e-9)


def bad_step(group, cut, bad):
    """A run in which one rank's gradient is not finite in step 1: whether weights stayed there, and its steps."""
    model, optimizer, axis = cut(group)
    now = [0]

    def spoil(gradient):
        return gradient * bad if now[0] == 1 and group.rank() == group.size() - 1 else gradient

    def telling(number, *place):
        now[0] = number
        return batches()(number, *place)

    def weights():
        with zero.gathered(model):
            return [parameter.detach().clone() for parameter in model.parameters()]

    weight = next(p for name, p in model.named_parameters() if name.endswith("k_proj.weight"))
    weight.register_hook(spoil)
    orders = schedule_of(model)
    steps = train(model, optimizer, telling, range(1), axis, progress=False, orders=orders)
    before = weights()
    steps += train(model, optimizer, telling, range(1, 2), axis, progress=False, orders=orders)
    same = all(torch.equal(*pair) for pair in zip(before, weights(), strict=True))
    return same, steps + train(model, optimizer, telling, range(2, 4), axis, progress=False, orders=orders)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("cut,p", [pytest.param(*CUTS[name][:1], CUTS[name][-1], id=name) for name in CUTS])
def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all(pool, cut, p, bad):
    ranks = pool(p).run(bad_step, cut, bad)
    assert len({str(steps) for _, steps in ranks}) == 1
    for same, steps in ranks:
        assert same and [math.isfinite(s.norm) for s in steps] == [True, False, True, True]
        assert all(math.isfinite(s.loss) for s in steps) and steps[-1].loss < steps[0].loss


def drawn(group):
    """What each rank shows, and the first tokens that it was given."""
    given = []

    def telling(*place):
        given.append(batches()(*place))
        return given[-1]

    model, optimizer, axis = by_both(group)
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        train(model, optimizer, telling, range(2), axis)
    return shown.getvalue(), [tokens.tolist() for parts in given for tokens, _ in parts]


def test_tensor_peers_get_the_same_data_replicas_others_and_the_first_rank_shows_the_progress(pool):
    shown, given = zip(*pool(4).run(drawn), strict=True)
    assert "tokens/s" in shown[0] and "2/2" in shown[0] and not any(shown[1:])
    assert given[0] == given[1] and given[2] == given[3] and given[0] != given[2]  # FAULTS D6


def refused(*args, **more):
    try:
        train(*args, progress=False, **more)
    except ValueError as error:
        return str(error)


def misfits(group):
    replica = data.replicate(plain(), group)
    lone = plain()
    stale = plain()
    optimizer = adamw(stale)
    stale = tensor.cut(stale, group)
    piped = plain()
    early = adamw(piped)
    piped = pipeline.cut(piped, group, ORDERS)
    return (*(refused(piped, *given, batches(), range(1), orders=orders) for given, orders in (
        ([early], ORDERS), ([adamw(piped)], forward_only(2, 3)))),
            refused(replica, adamw(replica), batches(), range(1)),
            refused(lone, adamw(lone), batches(), range(1), group), refused(stale, optimizer, batches(), range(1)))


def test_a_model_an_optimizer_and_a_group_that_do_not_belong_together_are_refused(pool):
    for early, forward, forgot, not_replicated, stale in pool(2).run(misfits):
        assert "parameters that the model has not: make it after tensor.cut and pipeline.cut" in early
        assert "has no backward passes, and would train nothing" in forward
        assert "summed over ranks [0, 1], and data is ranks None" in forgot
        assert "summed over ranks None, and data is ranks [0, 1]" in not_replicated
        assert "optimizer does not hold embed_tokens.weight" in stale and "after tensor.cut" in stale


def test_a_frozen_parameter_need_not_be_in_the_optimizer_and_a_trained_one_must():
    model = plain()
    optimizer = torch.optim.SGD(list(model.layers.parameters()), lr=0.1)
    with pytest.raises(ValueError, match=r"does not hold embed_tokens.weight, which is trained \(2 such\)"):
        train(model, optimizer, batches(), range(1), progress=False)
    for parameter in (model.embed_tokens.weight, model.norm.weight):
        parameter.requires_grad_(False)
    train(model, optimizer, batches(), range(1), progress=False)


def test_a_step_without_a_label_is_refused():
    model = plain()
    tokens = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="no token of this step has a label"):
        step(model, adamw(model), [(tokens, torch.full_like(tokens, -100))])
