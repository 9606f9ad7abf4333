"""How many cards: the layout that takes fewest, what each does, and what no number of them changes."""

from dataclasses import replace
from functools import cache
from math import ceil

import pytest

from shardlab.cost import Load, capacity, colocated, concurrency, layouts_of, serve_step
from shardlab.cost.why_not import alone
from shardlab.specs import ClusterSpec, Layout, find_card, find_model

EIGHT, SEVENTY, V3, OSS = (find_model(name) for name in ("llama-3.1-8b", "llama-3.1-70b", "deepseek-v3",
                                                         "gpt-oss-120b"))
H100, H200 = find_card("h100"), find_card("h200")
CHAT = Load(rate=100, prompt=1000, answer=200, ttft=0.5, tpot=0.05)


@cache
def chat():
    return capacity(EIGHT, H100, CHAT, price=3.0)


def test_the_fewest_cards_win_and_every_option_is_reckoned_alike():
    plan = chat()
    assert [one.layout for one in plan.options] == [Layout(), Layout(2), Layout(4), Layout(8)]
    for one in plan.options[:2]:
        room = concurrency(EIGHT, H100, one.layout, context=1200)
        cluster = ClusterSpec.of(H100, one.layout.tp) if one.layout.tp > 1 else alone(H100)
        best = colocated(serve_step(EIGHT, one.layout, cluster), CHAT, room.requests)
        assert one.rate == best and one.copies == ceil(100 / best.rate) and one.cards == one.copies * one.layout.tp
    assert plan.answer == "4 × h100: 4 copies of tp = 1" and plan.enough
    few = capacity(EIGHT, H100, CHAT, cards=2, layouts=[Layout()])
    assert not few.enough and few.answer.startswith("4 × h100, 2 more than there are")


def test_at_the_load_batch_and_time_agree():
    plan = chat()
    assert plan.at.rate == 25 and plan.at.batch == pytest.approx(25 * 200 * plan.at.tpot)
    assert CHAT.keeps(plan.at.ttft, plan.at.tpot, plan.at.gap)


def test_what_tokens_cost():
    plan = chat()
    assert plan.per_million["out"] == pytest.approx(4 * 3 / 3600 / (100 * 200) * 1e6)
    assert plan.per_million["total"] == pytest.approx(plan.per_million["out"] * 200 / 1200)


def test_too_slow_alone_is_too_slow_on_any_number():
    """SV33: replicas set to ceil(TTFT / target) shorten nothing."""
    for limit, said in ((dict(ttft=0.001), "a first token of a request alone takes"),
                        (dict(tpot=0.0005), "a further token of a request alone takes")):
        plan = capacity(EIGHT, H100, replace(CHAT, **limit))
        assert plan.chosen is plan.at is plan.split is None and plan.per_million == {} and not plan.enough
        assert plan.answer.startswith(f"no number of copies: {said}") and "at best (tp = 8)" in plan.answer
        assert "change the cut (tp), the bits or the card" in plan.answer and "copies do," not in str(plan)
        assert {row.note for row in plan.rows} == {"no number of them: a request alone takes too long"}
    together = capacity(EIGHT, H100, replace(CHAT, gap=0.0015, tpot=None, ttft=0.02))
    assert together.answer.startswith("no number of copies keeps all the times together")


def test_what_holds_no_request_is_no_option():
    plan = capacity(SEVENTY, H100, replace(CHAT, rate=1), cards=8)
    assert [one.layout.tp for one in plan.options] == [2, 4, 8]
    none = capacity(SEVENTY, H100, CHAT, cards=1)
    assert not none.options and none.answer == ("no layout on 1 × h100 holds a request of 1,200 tokens: with tp = 1, "
                                                "141.11 GB of weights alone, and a card has 85.521 GB")
    assert "does not fit" in str(none)


def test_layouts_that_are_tried():
    def degrees(spec, cards, card=H100):
        return [layout.degrees for layout in layouts_of(spec, card, cards)]

    assert degrees(EIGHT, 8) == ["tp = 1", "tp = 2", "tp = 4", "tp = 8"]
    assert degrees(EIGHT, 16)[4:] == ["pp = 2, tp = 8, 1f1b", "tp = 16"]
    assert degrees(EIGHT, 3) == ["tp = 1", "tp = 2"]
    assert degrees(V3, 4)[-2:] == ["dp = 2, ep = 2", "dp = 4, ep = 4"]
    assert degrees(V3, 32)[-2:] == ["dp = 16, ep = 16", "dp = 32, ep = 32"]
    assert not [one for one in degrees(OSS, 16) if "pp" in one]
    assert degrees(find_model("qwen2.5-7b"), 8) == ["tp = 1", "tp = 2", "tp = 4"]  # 28 heads, 4 of keys


def test_layouts_may_be_given():
    """A 70B on two nodes: over both by tensors, or one by tensors and two in a row, or a copy on each."""
    load = Load(rate=2, prompt=8000, answer=300, ttft=2)
    ways = Layout(16), Layout(8, pp=2), Layout(8)
    plan = capacity(SEVENTY, H100, load, cards=16, layouts=ways, sync=29e-6)
    by = {one.layout: one for one in plan.options}
    over, row, copy = (by[way] for way in ways)
    assert over.tpot < copy.tpot == pytest.approx(row.tpot, rel=0.02)
    assert 2 * copy.rate.rate > over.rate.rate and row.rate.rate > 1.5 * copy.rate.rate
    assert plan.options[0] in (copy, row)


def test_weights_in_fewer_bits_need_fewer_cards():
    load = Load(rate=1, prompt=2000, answer=200)
    wide, narrow = (capacity(SEVENTY, H100, load, dtype=dtype).chosen for dtype in ("bf16", "fp8"))
    assert (wide.cards, narrow.cards) == (2, 1)


def test_the_account_says_all_of_it():
    plan = chat()
    text, data = str(plan), plan.to_dict()
    for said in ("Answer: 4 × h100", "keep pace", "for a million tokens out", "share 0.6 (assumed)",
                 "More than one card? yes, peak throughput", "One pool or two? colocate"):
        assert said in text
    assert data["options"][0]["cards"] == 4 and data["split"]["pays"] is False and data["load"]["prompt"] == 1000
    assert data["at"]["batch"] == plan.at.batch and data["one_card"]["more"] is True
    for wrong, said in ((dict(price=0), "price must be"), (dict(cards=0), "cards must be"),
                        (dict(between="tin-cans"), "no bundled link 'tin-cans'")):
        with pytest.raises(ValueError, match=said):
            capacity(EIGHT, H100, CHAT, **wrong)
