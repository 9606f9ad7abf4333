"""Chapter 9 predicts what lab 9 ran: what is counted is equal; and what its prose says of the numbers is so."""

from itertools import pairwise

import pytest
from chapters import figures_of, numbers_of


@pytest.fixture(scope="module")
def page():
    return numbers_of("09_layouts")


@pytest.fixture(scope="module")
def lab():
    return figures_of("09_layouts")


def test_what_the_lab_counted_is_what_the_page_predicts(page, lab):
    assert (lab["equal"], lab["long"]) == (8, 64)
    for axis in ("tp", "pp", "dp"):
        assert (lab[f"calls_{axis}"], lab[f"bytes_{axis}"]) == (page["toy_count"][axis], page["toy_bytes"][axis])
    assert lab["crossed_tp"] > 5 * max(lab["crossed_pp"], lab["crossed_dp"])
    assert lab["slower_tp_predicted"] > 3 > 1.1 > lab["slower_dp_predicted"]


def test_the_bugs_were_as_quiet_as_the_page_says(lab):
    assert (lab["too_long"], lab["different_norms"]) == (pytest.approx(8), 4)
    assert lab["moved_clipped"] == pytest.approx(1) and lab["moved_own"] > 1.5
    assert 1e-4 < lab["tied_off"] < 0.02


def test_what_is_lost_is_split_up_whole_and_each_layout_loses_to_something_else(lab):
    most = {"dp4": "synchronising", "pp4": "bubble", "unequal": "imbalance"}
    kinds = ("work", "imbalance", "synchronising", "bubble")
    for name, kind in most.items():
        for end in ("", "_predicted"):
            shares = {each: lab[f"{each}_{name}{end}"] for each in kinds}
            assert sum(shares.values()) == pytest.approx(1)
        assert max(kinds[1:], key=shares.get) == kind
    assert lab["stood"] > 1.5


def test_the_opening_is_right(page):
    assert page["ways"] == 84
    times = [page["timed"](layout).seconds for layout in page["orders"].values()]
    assert max(times) == page["wrong"].seconds and times[0] == times[1]
    sent = [sum(map(sum, bill.sent.values())) for bill in (page["right"], page["wrong"])]
    assert sent[0] == pytest.approx(sent[1])
    assert 2.5 < page["wrong"].seconds / page["right"].seconds < 3.5


def test_who_speaks_how_often(page):
    calls, sent = page["calls"], page["sent"]
    assert calls["tp"] > 20 * calls["dp"] > 20 * calls["pp"] and sent["tp"] > 100 * sent["dp"] > 100 * sent["pp"]
    assert calls["pp"] == 64


def test_the_table_of_64_cards_says_what_fits_and_what_is_slow(page):
    over = {name for name, case in page["case"].items() if page["held"](*case) > page["card"]}
    assert over == {"DP64, ZeRO-3", "TP2, DP32, ZeRO-3", "TP8, DP8, ZeRO-1"}
    seconds = {name: page["timed"](*case).seconds for name, case in page["case"].items()}
    first = list(seconds)[:6]
    assert max(first, key=seconds.get) == "TP8, DP8, ZeRO-3"
    assert seconds["… recomputed"] < seconds["TP8, PP4, DP2, ZeRO-1"]
    wide = [bill.seconds for bill in page["W"].values()]
    assert wide == sorted(wide) and seconds["… recomputed"] / wide[0] < 8
    arithmetic = [page["timed"](*case).parts["arithmetic"] for case in page["case"].values()]
    assert max(arithmetic) < 1.03 * min(arithmetic)


def test_replicas_take_micro_batches_away_from_the_pipeline(page):
    grown, part = page["grown"], page["part"]
    cards = list(grown)
    assert [grown[n].layout.microbatches for n in cards] == [32, 16, 8, 4]
    assert all(part(a, "bubble", "imbalance") < part(b, "bubble", "imbalance") for a, b in pairwise(cards))
    assert page["gain"](512) < 5 < 8


def test_deepseek_v3s_states_fit_twice_and_tensor_parallelism_would_cost(page):
    published, card, states = page["published"], page["h800"].memory, page["states"]
    assert (published.world_size, published.expert_replicas) == (2048, 2)
    assert page["with_tp"].world_size == 2048 and page["live"] == 17
    assert [len(page[name].ranks) for name in ("single", "double", "cut_too")] == [16] * 3
    assert all(each.held < card / 2 for each in page["single"].ranks)
    assert max(map(states, page["double"].ranks)) < card / 2
    kept = [max(each.activations for each in page[name].ranks) for name in ("double", "cut_too")]
    assert kept[0] > 2 * card and kept[1] < kept[0] / 7
    assert max(map(states, page["double"].ranks)) < page["theirs"].held < card
    v3, tp = page["v3_time"], page["tp_time"]
    assert (v3.tokens, tp.tokens) == (page["step_tokens"], page["step_tokens"])
    assert tp.seconds > 1.3 * v3.seconds and tp.parts["tensor axis"] > 0.5 * (tp.seconds - v3.seconds)
    assert v3.parts["computed again"] < (tp.seconds - v3.seconds) / 5
    assert 1 < page["v3_step"] / v3.seconds < 2
    best = page["planned"].best.bill.seconds
    assert page["theirs"].bill.seconds < 1.05 * best and page["first_tp8"].bill.seconds > 1.2 * best


def test_llama_405b_is_laid_out_as_published(page):
    assert [layout.world_size for layout, _, _ in page["meta"]] == [8192, 16384, 16384]
    assert {bill.tokens for bill in page["herd"]} == {2**24}
    for reached, (_, _, published) in zip(page["reached"], page["meta"], strict=True):
        assert reached == pytest.approx(published, rel=0.06)


def test_exercises_have_these_answers(page):
    assert (page["ex_factors"].world_size, page["ex_factors"].expert_replicas) == (1024, 2)
    assert page["common"].place(37) | {} == {"pp": 2, "dp": 0, "cp": 0, "tp": 5, "ep": 0}
    assert page["too_wide"].seconds > 1.2 * page["right"].seconds
    assert 0 < len(page["fit"]) < len(page["eights"])


def test_what_the_planner_finds_goes_down_the_list(page):
    assert page["nothing"].best is None and page["nothing"].search.least > page["h100"].memory
    layouts = {cards: page["best"](cards).best.layout for cards in (16, 32, 64, 128, 256, 512, 1024)}
    assert [page["best"](cards).best.recompute is not None for cards in layouts] == [True] * 4 + [False] * 3
    assert (layouts[64].dp, layouts[64].zero, layouts[64].tp, layouts[64].pp) == (64, 3, 1, 1)
    assert layouts[128].dp == 64 and all(layouts[cards].pp > 1 and layouts[cards].tp > 1 for cards in (256, 512, 1024))
