"""Layouts of several axes, priced: by hand, against each other, and as published."""

import pytest

from shardlab.cost import memory, pipeline, training
from shardlab.cost.live import moments
from shardlab.schedule import SCHEDULES, peak_live
from shardlab.specs import Experts, Layout, ModelSpec, find_card, find_model

SPEC = ModelSpec(hidden=16, layers=6, heads=4, kv_heads=2, head_dim=4, ffn=29, vocab=53,
                 experts=Experts(routed=4, active=2, ffn=7, first_dense=1))
V3 = find_model("deepseek-v3")
PUBLISHED = dict(pp=16, dp=128, ep=64, zero=1, microbatches=120)  # 15,360 sequences a step: arXiv:2412.19437, §4.2
CARD = find_card("h800").memory


def v3(layout, **how):
    """Main gradients in fp32, experts' optimizer states over the two ranks that have the same: §3.2, §3.3.3."""
    return pipeline(V3, layout=layout, batch=1, seq=4096, dtype="bf16", master="fp32", gradients="fp32",
                    device="cuda", share_experts=True, **how)


def test_the_published_layout_of_v3_fits_with_every_stage():
    """2,048 cards as PP16 × DP128, EP64 among the 128, with all blocks computed again: less than half of each card."""
    layout = Layout(**PUBLISHED)
    bill = v3(layout, recompute="full")
    assert layout.world_size == 2048 and layout.expert_replicas == 2 and len(bill.ranks) == 16
    assert [len(each.stages[0].stage.layers) for each in bill.ranks] == [4] * 13 + [3] * 3
    assert all(each.held < CARD / 2 for each in bill.ranks) and bill.largest.rank == 0
    one = V3.experts.ffn * V3.hidden * 3
    rest = bill[4].parameters - 4 * 4 * one  # four of 256 experts in each of four layers
    assert bill[4].weights == 2 * bill[4].parameters and bill[4].gradients == pytest.approx(2 * bill[4].weights)
    assert bill[4].states == pytest.approx(12 * (rest / 128 + 16 * one / 2), rel=1e-4)
    assert [sum(each.live.values()) for each in bill.ranks] == list(range(16, 0, -1))


def test_v3_does_not_fit_where_nothing_is_computed_again():
    assert v3(Layout(**PUBLISHED)).largest.held > 2 * CARD


def test_the_same_over_eight_tensor_ranks():
    """TP8 leaves an eighth of the replicas: the rest of the weights is cut, the experts stay as they are."""
    cut = v3(Layout(8, pp=16, dp=16, ep=64, etp=1, zero=1, sp="keep", microbatches=32), recompute="full")
    plain = v3(Layout(**PUBLISHED), recompute="full")
    assert cut.layout.world_size == 2048 and all(each.held < CARD for each in cut.ranks)
    assert cut[4].parameters < plain[4].parameters and cut[4].activations < plain[4].activations / 7
    assert cut.hop * 8 == plain.hop


def test_training_is_the_bill_of_the_rank_that_holds_most():
    for layout in (Layout(pp=2, dp=2, ep=2, zero=1, microbatches=3), Layout(pp=3, cp=2, microbatches=2)):
        bills = pipeline(SPEC, layout=layout, batch=1, seq=64, dtype="bf16", master="fp32", device="cuda")
        each = [training(SPEC, layout, batch=1, seq=64, rank=rank, reserve="0 B") for rank in range(layout.world_size)]
        most = training(SPEC, layout, batch=1, seq=64, reserve="0 B")
        assert [bill.per_rank for bill in each] == [bills.at(rank).held for rank in range(layout.world_size)]
        assert most.per_rank == max(bill.per_rank for bill in each) == bills.largest.held
        assert most.rank == bills.largest.number and most.part("activations") == bills.largest.activations
    assert "on rank 0 of 6 (pp = 3, cp = 2, 1f1b), with layers 0–1, embedding" in str(most)


def test_ranks_of_a_pipeline_together_hold_the_model():
    """Each stage's weights once a replica, whatever the order of the axes; of experts a half."""
    for order in ("pp-dp-tp", "dp-tp-pp"):
        layout = Layout(pp=3, dp=2, ep=2, order=order)
        numbers = [memory(SPEC, layout, rank=rank).elements for rank in range(layout.world_size)]
        places = [layout.place(rank) for rank in range(layout.world_size)]
        assert sum(sum(each.values()) - each["experts"] for each in numbers) == 2 * (SPEC.total - 5 * 4 * 3 * 16 * 7)
        assert sum(each["experts"] for each in numbers) == 5 * 4 * 3 * 16 * 7
        assert {place["pp"] for place, each in zip(places, numbers, strict=True) if each["embedding"]} == {0}
        assert {place["pp"] for place, each in zip(places, numbers, strict=True) if each["head"]} == {2}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_what_is_live_is_what_the_schedule_says(kind):
    orders = SCHEDULES[kind](4, 8, **({"chunks": 2} if kind == "interleaved" else {}))
    held = [max(sum(n for _, n in (*moment.live, *moment.late)) for moment in moments(order)) for order in orders]
    assert held == peak_live(orders)
