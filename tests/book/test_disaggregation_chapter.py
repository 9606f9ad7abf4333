"""Chapter 11 predicts what lab 11 ran: bytes are equal, waits go by the account; its tables say what its prose says."""


import pytest
from chapters import FACTS, drawing, figures_of, numbers_of


@pytest.fixture(scope="module")
def page():
    return numbers_of("11_disaggregation")


@pytest.fixture(scope="module")
def lab():
    return figures_of("11_disaggregation")


def test_what_the_lab_counted_is_what_the_page_predicts(page, lab):
    sent = page["toy_sent"]
    assert (lab["counted"], lab["small"], lab["tail"]) == (sent(48), sent(48, "int8"), sent(64, had=48))
    assert lab["equal"] == lab["ways"] == 5
    assert lab["steps"] == lab["alike"] > 50
    assert (lab["without"], lab["other"], lab["pairs"]) == (0, 0, 1)


def test_waits_follow_the_account(page, lab):
    """In bulk all is waited for. By layers above B* a layer, or less: the link works while the token is chosen."""
    for name, share in lab.items():
        if name.startswith("exposed_"):
            _, kind, speed = name.split("_")
            told = page["account"](kind, lab[f"at_{kind}_{speed}"])
            assert told - 0.15 < share < told + 0.1, name
    assert lab["exposed_layers_1250"] < 0.12 and lab["exposed_layers_500"] > 0.3 > 0.1 > lab["exposed_int8_500"]


def test_the_figures_lines_are_the_pages(page):
    module = drawing("disaggregation")
    for kind in module.NAMES:
        for times in (0.2, 0.5, 1.25):
            assert module.exposed(kind, times) == pytest.approx(page["account"](kind, times))


def test_the_table_is_the_derivation(page):
    assert page["big"].break_even / 1e9 == pytest.approx(FACTS["A002-breakeven"], rel=0.01)
    assert page["big"].prefill * 1e3 == pytest.approx(FACTS["A002-prefill-h100"], rel=0.001)
    assert page["took"](page["llama"], "h100", page["tp8"], 1) > 2.5 * page["big"].seconds
    assert page["hit"].break_even == pytest.approx(10 * page["big"].break_even)
    assert page["hit"].break_even > page["ndr"].per_direction


def test_published_bytes_have_each_head_twice_and_times_lie_on_a_line(page):
    assert page["heads_twice"](1) == 2 * page["once"] == 385_024
    for tokens, first, nbytes, seconds in page["mooncake"]:
        assert page["heads_twice"](tokens) == pytest.approx(nbytes, rel=0.01)
        assert page["line"](nbytes) == pytest.approx(seconds, abs=0.3e-3)
        assert seconds / first < 0.04


def test_two_pools_pay_for_promises_only(page):
    rows = [page["at_gap"](gap) for gap in (None, 0.1, 0.05, 0.02, 0.015)]
    assert [row.two > row.one for row in rows] == [False, False, False, True, True]
    assert page["free"].two < page["free"].one and page["pays"].pays
    for i, found in enumerate(page["fails"]):
        assert not found.conditions[i].holds and not found.pays
    short = page["short"](500)
    assert short.two < short.one and page["pair"](50) < 0.65


def test_a_budget_does_as_much_as_a_good_split_and_the_wrong_one_less(page, lab):
    budgets = lab["kept_mixed"], lab["kept_mixed256"]
    assert max(lab["kept_first"], lab["kept_seven"]) < min(budgets)
    assert abs(max(budgets) - lab["kept_five"]) < 0.05
    assert page["pays"].prefill == 6 and lab["kept_six"] < min(budgets) - 0.1  # the best, by means
    two, six = 2 * page["answers"], 6 * page["prompts"]
    assert two < six and page["longer"].prefill < page["pays"].prefill
    assert page["longer"].two > two
