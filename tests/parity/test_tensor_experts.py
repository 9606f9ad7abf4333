"""Experts beside tensor parallelism, cut as the layers are or whole, and spread over ranks besides, against the plain
mixture: loss, gradients, norm, loads, and parameters after clipped steps (five where each way to cut is first seen, two
elsewhere), in float64, on every rank."""

import pytest
import torch
from mixtures import CLIP, KINDS, OPTIMIZERS, batch, build, distance, reference
from replicas import held

from shardlab import comm
from shardlab.parallel import balance, data, expert, grads, mesh, tensor
from shardlab.parallel.loss import valid_tokens

# ranks, and the axes: of the tensor axis, of the experts, ranks to an expert (None: as many as tp)
CUT = {"tp": (2, dict(tp=2)), "tp, dp": (4, dict(tp=2)), "tp, ep": (4, dict(tp=2, ep=2)), "tp 4": (4, dict(tp=4))}
WHOLE = {"tp": (2, dict(tp=2, etp=1)), "tp, dp": (4, dict(tp=2, etp=1)), "ep over tp": (2, dict(tp=2, ep=2, etp=1)),
         "ep 2 of 4": (4, dict(tp=2, ep=2, etp=1)), "ep inside tp": (4, dict(tp=4, ep=2, etp=1)),
         "ep over all": (4, dict(tp=2, ep=4, etp=1))}


def twin_of(group, kind, recompute, tp, ep=1, etp=None, sp=False):
    """(The twin on this rank, the data axis)."""
    how = {name: each for name, each in KINDS[kind].items() if name not in ("padded", "empty")}
    twin, p = build(**how, recompute=recompute), group.size()
    axes = mesh.build(dp=p // tp, tp=tp)
    tensor.cut(twin, axes.get_group("tp"), sp, etp)
    sites = p // (etp or tp)  # that may have experts of their own
    if ep > 1:
        over = mesh.build(edp=sites // ep, ep=ep, etp=etp or tp)
        expert.cut(twin, over.get_group("ep"), over.get_group("edp") if sites > ep else None)
    return data.replicate(twin, axes.get_group("dp"), 3000), axes.get_group("dp")


def compare(group, kind, expected, optimizer="sgd", recompute=None, **axes):
    twin, dp = twin_of(group, kind, recompute, **axes)
    optim, seen = OPTIMIZERS[optimizer](list(twin.parameters())), []
    drawn = {name: True for name in ("padded", "empty") if name in KINDS[kind]}

    def mine(whole):
        return held({name: whole[name] for name, _ in twin.named_parameters()}, twin)

    for step, (loss, norm, gradients, told, dropped) in enumerate(expected[0]):
        now, routed, total = batch(step, **drawn), [], torch.zeros((), dtype=torch.float64)
        valid = valid_tokens(labels for _, labels, _ in now)
        parts = now[dp.rank() :: dp.size()]
        for i, (tokens, labels, real) in enumerate(parts):
            with data.no_sync(twin) if i < len(parts) - 1 else torch.enable_grad():
                each = twin.loss(tokens, labels, valid, routed, real)
                each.backward()
            total += each.detach()
        comm.all_reduce(total, group=dp)
        grads.finish(twin)
        far = {"loss": abs(loss - total.item()),
               "gradients": distance(mine(gradients), {name: p.grad for name, p in twin.named_parameters()})}
        far["norm"] = abs(norm - grads.clip_grad_norm_(twin, CLIP).item()) / norm
        optim.step()
        optim.zero_grad()
        load, lost = balance.loads(twin, routed, dp)
        seen.append(far | {"loads": (load - told).abs().max().item() + abs(lost - dropped)})
    parameters = distance(mine(expected[1]), {name: p.detach() for name, p in twin.named_parameters()})
    return {name: max(each[name] for each in seen) for name in seen[0]} | {"parameters": parameters}


def check(pool, kind, cut, optimizer="sgd", steps=2, **how):
    ranks, axes = cut
    for seen in pool(ranks).run(compare, kind, reference(kind, optimizer, steps), optimizer, **axes, **how):
        assert max(seen["loss"], seen["gradients"], seen["norm"]) < 1e-10, seen
        assert seen["parameters"] < 1e-9 and seen["loads"] == 0, seen


@pytest.mark.parametrize("sp", [False, "keep", "again"])
@pytest.mark.parametrize("kind", ["balanced", "deepseek", "position", "padded", "skewed, full"])
def test_cut_experts(pool, kind, sp):
    check(pool, kind, CUT["tp"], sp=sp, steps=5 if kind == "deepseek" else 2)


@pytest.mark.parametrize("cut", ["tp, dp", "tp, ep", "tp 4"])
@pytest.mark.parametrize("kind,sp", [
    ("deepseek", False), ("weight", "keep"), ("empty", False), ("some frozen", "again")])
def test_cut_experts_on_more_axes(pool, kind, sp, cut):
    check(pool, kind, CUT[cut], sp=sp)


@pytest.mark.parametrize("sp", [False, "keep", "again"])
@pytest.mark.parametrize("cut", WHOLE)
def test_whole_experts(pool, cut, sp):
    check(pool, "deepseek", WHOLE[cut], sp=sp, steps=2 if sp else 5)


@pytest.mark.parametrize("cut", ["tp", "ep over tp", "ep over all"])
@pytest.mark.parametrize("kind", ["dropless", "one left out", "all to one", "empty", "some frozen", "only experts"])
def test_whole_experts_of_other_kinds(pool, kind, cut):
    check(pool, kind, WHOLE[cut])


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("cut,sp", [(CUT["tp, ep"], False), (CUT["tp"], "again"), (WHOLE["ep over all"], "keep")])
def test_what_is_computed_again_goes_to_the_same_experts(pool, cut, sp, recompute):
    check(pool, "deepseek", cut, sp=sp, recompute=recompute)


@pytest.mark.parametrize("cut", [CUT["tp, ep"], WHOLE["ep over all"]])
def test_by_adamw_too(pool, cut):
    check(pool, "deepseek", cut, "adamw")
