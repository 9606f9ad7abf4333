"""Cut experts together with the other axes, against the plain model: replicas of experts, ZeRO, a pipeline."""

import pytest
from mixtures import parity

from shardlab.schedule import SCHEDULES

EDP = dict(edp=2, ep=2)
PP = dict(pp=2, ep=2)


@pytest.mark.parametrize("kind,how", [
    ("dropless", dict(optimizer="adamw")), ("deepseek", dict(transport="shm")), ("position", {}), ("some frozen", {}),
    ("only the last", {}), ("empty", dict(recompute="full")),
])
def test_experts_and_replicas_of_them(pool, kind, how):
    parity(pool, kind, 4, axes=EDP, steps=2, **how)


@pytest.mark.parametrize("axes", [dict(ep=2, edp=2), dict(edp=4, ep=1)], ids=["apart", "replicas alone"])
def test_ranks_of_a_group_need_not_be_neighbours(pool, axes):
    parity(pool, "deepseek", 4, axes=axes, steps=2)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", ["deepseek", "some frozen", "empty"])
def test_zero_leaves_experts_alone(pool, kind, stage):
    parity(pool, kind, 2, "adamw", stage=stage, steps=2, rate=0.01 if kind == "deepseek" else 0.0)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_and_replicas(pool, stage):
    parity(pool, "position", 4, "adamw", axes=EDP, stage=stage, steps=2, recompute="full")


@pytest.mark.parametrize("kind", ["deepseek", "position"])
@pytest.mark.parametrize("name", ["1f1b", "zero_bubble", "dualpipe_v"])
def test_experts_in_a_pipeline(pool, name, kind):
    """Each stage adds the load-balance loss of its own layers."""
    m = 4 if name == "dualpipe_v" else 2
    parity(pool, kind, 4, "adamw", axes=PP, orders=SCHEDULES[name](2, m), parts=2 * m, steps=2, layers=5)


@pytest.mark.parametrize("kind,axes,how", [
    ("deepseek", dict(pp=2, ep=1), {}), ("balanced", dict(pp=2, ep=1), dict(recompute="full")),
    ("only the last", PP, {}), ("empty", PP, dict(recompute="full")), ("late", PP, dict(stage=1, tied=False)),
    ("late", dict(pp=2, edp=2, ep=1), {}),
], ids=str)
def test_stages_of_which_some_have_no_experts_or_nothing_to_train(pool, kind, axes, how):
    ranks = axes["pp"] * axes.get("edp", 1) * axes["ep"]
    parity(pool, kind, ranks, axes=axes, orders=SCHEDULES["zero_bubble"](2, 8 // ranks), steps=2, layers=5, **how)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_whole_experts_on_a_data_axis(pool, stage):
    """Not cut, and so no others than the rest to the data axis."""
    parity(pool, "deepseek", 2, "adamw", axes=dict(dp=2, ep=1), stage=stage, steps=2, rate=0.01, recompute="full")
