"""Six verdicts on more cards, and five conditions for two pools, each made to fail alone."""

from dataclasses import replace

import pytest

from shardlab.cost import Load, concurrency, handover, serve_step, why_not, why_not_split
from shardlab.cost.why_not import alone
from shardlab.specs import Layout, find_card, find_link, find_model

EIGHT, SEVENTY = find_model("llama-3.1-8b"), find_model("llama-3.1-70b")
H100, NIC = find_card("h100"), find_link("ib-ndr")
CHAT = Load(rate=1, prompt=1000, answer=200, ttft=0.5, tpot=0.05)


# more cards than one


@pytest.mark.parametrize(("aim", "reason", "said"), [
    (None, "fits and fast enough", "433 requests fit at once"),
    ("throughput", "traffic too low", "1 requests/s are 4.0% of the 25.1 that one card does"),
    ("latency", "latency already met", "allowed: 500 ms for a first one, 50 ms for a further one")])
def test_no(aim, reason, said):
    found = why_not(EIGHT, H100, CHAT, aim=aim)
    assert (found.more, found.reason, found.remedy) == (False, reason, "")
    assert said in found.why and found.sentence == f"no, {reason}: {found.why}"


def test_yes_it_does_not_fit():
    found = why_not(SEVENTY, H100, CHAT)
    assert found[:2] == (True, "does not fit") and "141.11 GB of weights alone, and a card has 85.521 GB" in found.why
    beside = replace(H100, physical=None, usable=142 * 10**9)
    assert "with one request, and a card has 142 GB" in why_not(SEVENTY, beside, CHAT).why
    assert not why_not(SEVENTY, H100, replace(CHAT, rate=0.1), dtype="fp8").more


def test_yes_concurrency():
    """Long answers to long prompts: the card could compute more of them than it has room for."""
    load = Load(rate=0.5, prompt=2000, answer=4000)
    small = replace(H100, physical=None, usable=24 * 10**9)
    found, room = why_not(EIGHT, small, load), concurrency(EIGHT, small, context=6000)
    assert found[:2] == (True, "concurrency") and f"{room.requests} requests fit at once" in found.why
    assert "copies do, which send nothing to each other" in found.remedy
    assert why_not(EIGHT, H100, load).reason == "fits and fast enough"


def test_yes_peak_throughput():
    found = why_not(EIGHT, H100, replace(CHAT, rate=100))
    assert found[:2] == (True, "peak throughput") and "25.1 requests/s in time; 100 requests/s" in found.why
    assert found.remedy == "4 copies do, which send nothing to each other"


def test_yes_latency_which_copies_do_not_shorten():
    long = why_not(EIGHT, H100, replace(CHAT, prompt=30_000))
    assert long[:2] == (True, "latency") and "a first token takes 1.10 s, and may take 500 ms" in long.why
    quick = why_not(EIGHT, H100, replace(CHAT, tpot=0.004))
    assert "a further one takes 5.65 ms, and may take 4 ms" in quick.why
    for found in (long, quick):
        assert found.remedy.startswith("copies do not shorten it: cut the layers (tp)")
        assert "copies do," not in found.sentence


def test_an_aim_that_is_none_is_refused():
    with pytest.raises(ValueError, match="aim = 'glory': more cards are for 'throughput' or for 'latency'"):
        why_not(EIGHT, H100, CHAT, aim="glory")


# two pools instead of one

STEP = serve_step(EIGHT, None, alone(H100))
TIGHT = Load(rate=11, prompt=8000, answer=300, ttft=0.3, tpot=0.03, gap=0.02)
NAMES = ["one pool misses the limits", "the links are fast enough", "enough instances", "a stable mix", "long prompts"]


def split(load=TIGHT, link=NIC, dtype="bf16", ports=None, **how):
    moved = handover(EIGHT, load.prompt, prefill=STEP([(load.uncached, load.prompt)]), link=link, dtype=dtype,
                     ports=ports)
    return why_not_split(STEP, load, moved, **{"instances": 8, "most": 50, **how})


def test_two_pools_pay_where_all_five_hold():
    found = split()
    assert found.pays and not found.failed and [each.name for each in found.conditions] == NAMES
    assert found.one < TIGHT.rate < found.two and found.prefill == 6
    assert found.answer == (f"disaggregate: 6 for prompts and 2 for answers do {found.two:.3g} requests/s in time, "
                            f"where 8 that do both do {found.one:.3g}")


@pytest.mark.parametrize(("change", "fails", "said"), [
    (dict(load=replace(TIGHT, rate=10)), 0, "8 instances that do both do 10.5 requests/s, pieces of 512 tokens a step"),
    (dict(link=replace(NIC, per_direction=4.5e9)), 1, "4.5 GB/s are 0.93 × B*, of which 2 × is wanted"),
    (dict(load=replace(TIGHT, rate=3), instances=2), 2, "of 2 instances the best split, 1 : 1, is 67% off"),
    (dict(load=replace(TIGHT, rate=5), instances=3), 2, "of 3 instances the best split, 2 : 1, is 33% off"),
    (dict(swing=1.5), 3, "prompts to answers swing by 1.5 ×, of which 1.2 is borne"),
    (dict(short=8000), 4, "8,000 tokens of a prompt are computed; up to 8,000 are as well off")])
def test_each_condition_fails_alone(change, fails, said):
    found = split(**change)
    assert found.failed == [NAMES[fails]] and not found.pays
    assert found.answer.startswith("colocate: ") and said in found.answer


def test_what_helps_a_condition():
    slow = replace(NIC, per_direction=8e9)
    assert split(link=slow).conditions[1].why.endswith("of which 2 × is wanted, and in int8 reached")
    assert split(link=slow).pays and not split(link=replace(NIC, per_direction=4.5e9)).conditions[1].holds
    assert not split(link=replace(NIC, per_direction=4.5e9), dtype="int8").conditions[1].holds
    assert split(link=replace(NIC, per_direction=4.5e9), ports=3).conditions[1].holds
    assert split(swing=1.5, switch=True).pays


def test_all_five_do_not_pay_where_two_pools_do_less():
    found = split(load=replace(TIGHT, rate=13, gap=0.03))
    assert not found.failed and found.two < found.one < 13 and not found.pays
    assert found.answer == f"colocate: two pools do {found.two:.3g} requests/s in time, and one does {found.one:.3g}"
    hopeless = split(load=replace(TIGHT, tpot=0.001))
    assert hopeless.two == hopeless.one == 0 and not hopeless.pays


def test_the_account_shows_all_five_and_both_rates():
    found = split()
    data = found.to_dict()
    assert [row.note for row in found.rows[:5]] == ["yes"] * 5 and "6 : 2" in str(found)
    assert data["pays"] and data["two"] == found.two and [each["name"] for each in data["conditions"]] == NAMES
    one = split(instances=1)
    assert (one.two, one.prefill) == (0.0, 1) and "none" in str(one) and not one.pays


def test_answers_may_be_made_on_other_cards_than_prompts():
    """A decode instance that is quicker takes more answers, so more of the instances are for prompts."""
    other = split(decode=lambda work: STEP(work) / 3)
    assert other.two > split().two and other.prefill == 7
    group = handover(EIGHT, 8000, Layout(2), prefill=0.2, link=NIC)
    assert group.ports == 2
