"""ZeRO against the plain model: every rank's gradients, put together, norm, losses and weights, step by step."""

import pytest
import torch
from replicas import (
    FROZEN,
    OPTIMIZERS,
    STAGES,
    build,
    check,
    check_float32,
    compare,
    cut,
    parameters,
    train,
)

from shardlab import comm
from shardlab.parallel import mesh, tensor

WORLDS = [2, 3, 4]
ZERO = [1, 2, 3]


@pytest.mark.parametrize("stage", ZERO)
@pytest.mark.parametrize("p", WORLDS)
def test_a_sharded_model_is_the_plain_one(pool, p, stage):
    """Five steps of AdamW; of the others, which forgive no factor, two on three ranks, where nothing divides."""
    for optimizer in OPTIMIZERS if p == 3 else ("adamw",):
        check(pool(p).run(compare, stage, optimizer, steps=5 if optimizer == "adamw" else 2))


@pytest.mark.parametrize("stage", ZERO)
@pytest.mark.parametrize("p", [pytest.param(p, marks=[pytest.mark.more] * (p < 4)) for p in WORLDS])
def test_a_sharded_model_is_the_plain_one_through_shared_memory(pool, p, stage):
    check(pool(p).run(compare, stage, transport="shm", steps=2))
    check_float32(pool(p).run(compare, stage, "sgd", "shm", torch.float32, steps=2))


@pytest.mark.parametrize("stage", ZERO)
def test_a_single_rank_is_the_plain_model(pool, stage):
    check(pool(1).run(compare, stage, steps=2))


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("stage", ZERO)
def test_a_sharded_model_that_computes_again(pool, stage, recompute):
    check(pool(2).run(compare, stage, recompute=recompute, steps=2))


ALL = [name for name, _ in build(0).named_parameters()]
FREEZE = {
    "the table": ("embed_tokens.weight", *FROZEN),
    "the last norm": ("norm.weight", "layers.1.mlp.down_proj.bias"),
    "the first block": tuple(name for name in ALL if name.startswith("layers.0.")),
    "the last block": tuple(name for name in ALL if name.startswith("layers.1.")),
    "all before the last block": tuple(name for name in ALL if not name.startswith(("layers.1.", "unused"))),
}


@pytest.mark.parametrize("frozen", FREEZE)
def test_units_without_trained_parameters(pool, frozen):
    for stage, tied in ((2, True), (3, True), (3, False)):
        for seen in pool(3).run(compare, stage, frozen=FREEZE[frozen], tied=tied, steps=2, transport="shm"):
            assert max(seen["loss"], seen["norm"], seen["gradients"], seen["parameters"]) < 1e-10, (stage, tied, seen)


def again(group, stage):
    ways = ("backend", "shm", "backend", "shm", "backend")
    outcomes = [compare(group, stage, steps=2, transport=transport) for transport in ways]
    assert outcomes[0] == outcomes[2] == outcomes[4] and outcomes[1] == outcomes[3]
    return outcomes


@pytest.mark.parametrize("stage", ZERO)
def test_five_times_over(pool, stage):
    for outcomes in pool(2).run(again, stage):
        check(outcomes)


def on_a_mesh(_group, mode, transport):
    """Data × tensor: replicas of a model that is cut, each over two neighbours; by stage."""
    axes = mesh.build(dp=2, tp=2)  # once: its groups' threads stay
    dp, tp = axes.get_group("dp"), axes.get_group("tp")
    out = {}
    for stage in STAGES:
        plain, twin = build(0, qk_norm=True), tensor.cut(build(dp.rank(), qk_norm=True), tp, mode)
        theirs, ours = (OPTIMIZERS["adamw"](model) for model in (plain, twin))
        cut(twin, ours, dp, stage)
        with comm.use(transport=transport):
            seen = [train(plain, theirs, twin, ours, dp, step)[0] for step in range(2)]
        out[stage] = {name: max(each[name] for each in seen) for name in seen[0]} | {
            "parameters": parameters(plain, twin)}
    return out


@pytest.mark.parametrize(("mode", "transport"), [(False, "backend"), ("keep", "shm")])
def test_data_times_tensor(pool, mode, transport):
    for out in pool(4).run(on_a_mesh, mode, transport):
        for at, seen in out.items():
            assert max(seen["loss"], seen["norm"], seen["gradients"]) < 1e-10 and seen["parameters"] < 1e-9, (at, seen)
