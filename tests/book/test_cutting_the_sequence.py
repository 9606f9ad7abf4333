"""Chapter 8 predicts what lab 8 ran: what is counted is equal; and what its prose says of the numbers is so."""


import pytest
from chapters import figures_of, numbers_of

from shardlab.parallel.zigzag import places


@pytest.fixture(scope="module")
def page():
    return numbers_of("08_sequence")


@pytest.fixture(scope="module")
def lab():
    return figures_of("08_sequence")


def test_what_the_lab_counted_is_what_the_page_predicts(page, lab):
    assert (lab["tokens"], lab["seq"], lab["length"]) == (48, 2048, 61)
    assert (lab["ring_forward"], lab["ring_backward"]) == (3 * page["lab_kv"], 6 * page["lab_kv"])
    for op in ("send", "all_reduce"):
        assert lab[op] == lab[f"{op}_predicted"] == page["toy_step"].total(op)
    for order in ("plain", "zigzag"):
        assert [lab[f"{order}_{rank}"] for rank in range(4)] == [sum(each) for each in page[f"lab_{order}"]]
    assert lab["longer"] == pytest.approx(page["waited"](page["lab_plain"]) / page["waited"](page["lab_zigzag"]))
    assert lab["account_1"] == lab["kept_1"] == page["lab_kept"][1].total
    assert lab["account_4"] == page["lab_kept"][4].total
    assert lab["kept_4"] == lab["account_4"]


def test_the_bugs_were_as_quiet_as_the_page_says(lab):
    assert lab["loss_off"] < 0.01 < 0.5 < lab["gradient_off"]
    assert lab["bf16_error"] > 2 and lab["fp32_error"] == pytest.approx(1, abs=0.05)


def test_no_other_cut_makes_one_sequence_smaller(page):
    cached, kept, Layout = page["cached"], page["kept"], page["Layout"]
    assert cached(Layout(tp=16)) == cached(Layout(tp=8)) == cached(Layout()) / 8
    recomputed = kept(page["again8"], page["million"], "full")
    assert recomputed.layers > 2 * page["card"] > page["card"] > page["share"]
    assert page["piped"][page["million"]] >= recomputed.layers
    assert kept(page["cp"](8), page["million"], "full").total == pytest.approx(recomputed.total / 8, rel=1e-3)


def test_two_parts_of_a_softmax_are_the_whole(page):
    both = page["weight_a"] * page["a"] + page["weight_b"] * page["b"]
    assert both == pytest.approx(page["result"](page["s"], page["v"]))
    assert page["weight_a"] + page["weight_b"] == pytest.approx(1)


@pytest.mark.parametrize("p", [2, 4, 8, 16])
def test_every_step_of_zigzag_is_alike_and_the_plain_order_waits_for_squares(page, p):
    assert page["zigzag_order"](32 * p, p) == places(32 * p, p).tolist()
    plain, zigzag = page["fine"][p]
    assert all(len(set(step)) == 1 for step in zip(*zigzag, strict=True))
    assert page["part"](plain, p - 1) == pytest.approx((2 * p - 1) / p**2, rel=0.05)
    assert max(map(sum, plain)) == plain[-1][0] + (p - 1) * 32**2


def test_from_where_on_the_ring_hides(page):
    nvlink, infiniband = page["nvlink"], page["infiniband"]
    for link in (nvlink, infiniband):
        tokens = page["covers"](page["kv_bytes"], page["pair_flop"], link)
        step, hop = tokens**2 * page["pair_flop"] / page["rate"], tokens * page["kv_bytes"] / link.per_direction
        assert step >= hop > step * (1 - 2 / tokens)
    lengths = 8192, page["trained"], page["million"]
    hidden = [page["per_hop"](n / 8, infiniband) < page["per_step"](n / 8) for n in lengths]
    assert hidden == [False, True, True]
    assert page["backward"] == 3 * page["forward"]


def test_ring_and_heads_cross_where_the_page_says(page):
    ring, heads = page["ring_sends"], page["heads_send"]
    assert [ring(page["llama"], p) < heads(page["llama"], p) for p in (2, 4, 8)] == [True, True, True]
    assert ring(page["v3"], 2) == pytest.approx(heads(page["v3"], 2)) and ring(page["v3"], 4) > heads(page["v3"], 4)
    assert page["refused"](page["Layout"](tp=8, cp=2)).endswith("cp can be 1")


def test_both_ways_to_use_64_cards_fit(page):
    states, kept, trained = page["states"], page["kept"], page["trained"]
    assert states + kept(page["replicas"], trained, "full").peak < page["card"]
    assert states + kept(page["together"], trained).peak < page["card"]
    assert page["longest"](1) < trained < page["longest"](1, "full") < page["million"] < page["longest"](4, "full")
