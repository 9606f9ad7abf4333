"""A pipeline of ranks that are cut over other axes too, against the plain model: tensor, sequence, data, ZeRO-1."""

import math
from pipes import FROZEN, OPTIMIZERS, batch, build, cut, parity, reference

import pytest
import torch
from twins import mine

from shardlab import comm
from shardlab.parallel import data, execute, grads, mesh, pipeline, zero
from shardlab.parallel.loss import valid_tokens
from shardlab.schedule import SCHEDULES, forward_only, gpipe, one_f_one_b, zero_bubble

TP, DP = dict(tp=2, pp=2), dict(dp=2, pp=2)


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble", "interleaved"])
@pytest.mark.parametrize("mode,how", [
    (False, dict(optimizer="adamw", transport="shm")),
    ("keep", dict(recompute="full")),
    ("again", dict(kind="untied", optimizer="adamw", recompute="selective")),
])
def test_with_a_tensor_axis(pool, name, mode, how):
    """Tied over both: the embedding is cut over one axis, and its gradient is in parts on the other."""
    parity(pool, SCHEDULES[name](2, 4), ranks=4, axes=TP, mode=mode, **how)


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("kind", ["tied", "frozen first", "no layers"])
def test_with_a_data_axis(pool, name, kind):
    """FAULTS P6, pytorch#144530: where backward is split, hooks of the data axis were passed by."""
    orders = SCHEDULES[name](2, 3)
    parity(pool, orders, kind, ranks=4, axes=DP, data_axis="data", replicas=2, optimizer="adamw")


@pytest.mark.parametrize("name,kind", [("1f1b", "untied"), ("zero_bubble", "frozen last"), ("dualpipe_v", "tied")])
def test_with_zero_1(pool, name, kind):
    orders = SCHEDULES[name](2, 4)
    parity(pool, orders, kind, ranks=4, axes=DP, data_axis="zero", replicas=2, optimizer="adamw")


def put_off(group, **how):
    """How many matrices of a stage have no gradient after I, and how many have one after W, of how many."""
    orders = zero_bubble(1, 1)
    model = cut(group, gpipe(1, 1), frozen=(), **how)[0]
    seen, told = [], execute._Rank.weights

    def look(self, action):
        matrices = [p for name, p in model.named_parameters() if name.endswith("proj.weight")]
        seen.append(sum(p.grad is None for p in matrices))
        told(self, action)
        seen.append(sum(p.grad is not None for p in matrices))
        seen.append(len(matrices))

    execute._Rank.weights = look
    try:
        execute.run(model, orders, batch(1, 0))
    finally:
        execute._Rank.weights = told
    return seen


@pytest.mark.parametrize("mode,recompute", [(False, None), ("keep", "full"), ("again", None)])
def test_weight_gradients_are_put_off(pool, mode, recompute):
    """Of plain layers and of tensor-cut ones, computed again or not."""
    assert pool(1).run(put_off, recompute=recompute) == [[35, 35, 35]]
    assert pool(2).run(put_off, axes=dict(tp=2, pp=1), mode=mode, recompute=recompute) == [[35, 35, 35]] * 2


def norms(group, how):
    orders = one_f_one_b(2, 3)
    model, *_ = cut(group, orders, **how)
    execute.run(model, orders, batch(3, 0))
    grads.finish(model)
    return [grads.norm(model, p).item() for p in (1, 2, math.inf)]


@pytest.mark.parametrize("how", [dict(), dict(tied=False), dict(axes=TP, mode="keep")], ids=["tied", "untied", "tp"])
def test_d11_the_norm_of_all_stages_is_one_process_s(pool, how):
    """torchtitan#596, #649: of each stage for itself; and the formula of p wrong for inf."""
    _, _, gradients = reference(3, steps=1, frozen=FROZEN, tied=how.get("tied", True))[0][0]
    whole = torch.cat([g.flatten() for g in gradients.values() if g is not None])
    expected = [torch.linalg.vector_norm(whole, p).item() for p in (1, 2, math.inf)]
    for seen in pool(4 if "axes" in how else 2).run(norms, how):
        assert seen == pytest.approx(expected, rel=1e-12)


def evaluated(group, orders, how):
    """(Loss, logits or None, whether anything is left in .grad), of a model in eval."""
    model, *_ = cut(group, orders, dropout=0.5, **how)
    model.eval()
    parts = batch(schedule_size(orders), 0)
    loss = execute.run(model, orders, parts)
    logits = execute.logits(model, orders, [tokens for tokens, _ in parts])
    model.train()
    return loss.item(), logits, any(p.grad is not None for p in model.parameters()), loss.requires_grad


def schedule_size(orders):
    return len({action.microbatch for action in orders[0]})


@pytest.mark.parametrize("p,microbatches,chunks,how", [
    (2, 1, 1, {}), (3, 4, 1, {}), (2, 3, 2, dict(tied=False)), (2, 3, 1, dict(axes=TP)),
    (2, 3, 1, dict(axes=TP, mode="keep"))])
def test_forward_alone_gives_the_plain_loss_and_logits_and_leaves_nothing(pool, p, microbatches, chunks, how):
    orders = forward_only(p, microbatches, chunks)
    plain = build(tied=how.get("tied", True)).eval()
    parts = batch(microbatches, 0)
    with torch.no_grad():
        valid = valid_tokens(labels for _, labels in parts)
        expected = sum(plain.loss(*part, valid) for part in parts).item() if valid else math.nan
        whole = [plain(tokens) for tokens, _ in parts]
    outcomes = pool(4 if "axes" in how else p).run(evaluated, orders, how)
    assert sum(logits is not None for _, logits, *_ in outcomes) == (2 if "axes" in how else 1)
    for loss, logits, left, tracked in outcomes:
        assert loss == pytest.approx(expected, rel=1e-12) and not left and not tracked
        assert logits is None or all(torch.allclose(a, b, 1e-10) for a, b in zip(logits, whole, strict=True))


def refused(group, stage):
    model = pipeline.cut(build(), mesh.build(**DP).get_group("pp"))
    try:
        zero.shard(model, OPTIMIZERS["adamw"](model.parameters()), mesh.build(**DP).get_group("dp"), stage)
    except ValueError as error:
        return str(error), hasattr(model, "reducer")


def test_zero_with_a_pipeline_is_refused_where_it_would_not_be_right(pool):
    for stage in (2, 3):
        for said, changed in pool(4).run(refused, stage):
            assert "once for each micro-batch: take stage 1" in said and not changed


def without_valid(group):
    """Each replica knows its own labels alone: a loss of theirs would be too large by the number of replicas."""
    axes, orders = mesh.build(**DP), one_f_one_b(2, 2)
    model = data.replicate(pipeline.cut(build(), axes.get_group("pp"), orders), axes.get_group("dp"))
    with comm.record() as ledger, pytest.raises(ValueError, match="give the number of labels of all: valid"):
        execute.run(model, orders, batch(2, 0))
    loss = execute.run(model, forward_only(2, 2), batch(2, 0))  # which sums no gradients
    return len(ledger.entries), loss.item()


def test_a_data_axis_wants_the_number_of_all_labels(pool):
    assert len({each for each in pool(4).run(without_valid)}) == 1


def windows(group):
    """A tensor-cut model's stage holds this rank's window of what the plain model has of it."""
    model, *_ = cut(group, one_f_one_b(2, 2), axes=TP)
    plain = dict(build().named_parameters())
    return all(torch.equal(mine(plain[name].detach(), p), p.detach()) for name, p in model.named_parameters())


def test_the_parts_of_the_layers_are_the_plain_ones(pool):
    assert all(pool(4).run(windows))
