"""Chapter 10 predicts what lab 10 ran: what is counted is equal; and what its prose says of the numbers is so."""

from itertools import pairwise

import pytest
from chapters import FACTS, drawing, figures_of, numbers_of


@pytest.fixture(scope="module")
def page():
    return numbers_of("10_serving")


@pytest.fixture(scope="module")
def lab():
    return figures_of("10_serving")


@pytest.fixture(scope="module")
def drawn():
    return drawing("serving")


def test_what_the_lab_counted_is_what_the_page_predicts(page, lab):
    assert lab["equal"] == lab["ways"] == 8
    for name, seq in (("token", 1), ("prompt", 64)):
        bill = page["toy_bill"](seq)
        assert (lab[f"sums_{name}"], lab[f"bytes_{name}"]) == (bill.count("all_reduce"), bill.total("all_reduce"))
    cache = page["toy_cache"]
    assert (lab["kv_one"], lab["kv_int8"], lab["kv_tp2"], lab["kv_tp4"]) == (
        cache(), cache(dtype="int8"), cache(2), cache(4))
    assert cache(2) == cache(4) == cache() / 2
    assert (lab["prompts"], lab["found"], lab["wrong"]) == (600, 448, 7)


def test_the_opening_and_the_ridge(page):
    assert page["token"] / (page["prompt"] / page["tokens"]) > 100
    assert page["used"] < 0.01 and page["floor"](2, page["tokens"]) / page["token"] < 1.03
    for name in ("h100", "a100"):
        assert page[name].ridge("bf16") == pytest.approx(FACTS[f"B8-{name}-ridge"], rel=0.01)
    crossing = page["h100"].ridge("bf16")
    weights = page["bytes_read"](page["llama"], page["tp8"]) / page["h100"].hbm
    assert page["multiplied"](crossing) == pytest.approx(weights, rel=0.03)  # of all weights, the embedding's too


def test_long_contexts_never_reach_the_ridge(page):
    """A token's cache takes longer to read than the token to multiply from `never` tokens of context on."""
    never, floor = page["never"], page["floor"]
    for context, reads in ((round(0.9 * never), False), (round(1.1 * never), True)):
        bound = [floor(batch, context) > 1.001 * page["multiplied"](batch) for batch in (10**5, 10**6)]
        assert bound == [reads] * 2


def test_a_token_waits_for_calls_and_a_prompt_for_bytes(page):
    calls, wires = page["calls"], page["wires"]
    assert [each.payload for each in (page["of_token"], page["of_many"], page["of_prompt"])] == [2**14, 2**20, 2**27]
    assert calls(page["of_many"]) > 3 * wires(page["of_many"])
    assert wires(page["of_prompt"]) > 30 * calls(page["of_prompt"])
    few, _ = page["measured_sum"]["8 × H100"]
    assert 1000 * page["sums"] * few == pytest.approx(FACTS["A10-sums-token"])
    assert 0.8 < page["sums"] * few / page["weights_read"]["8 × H100"] < 1
    assert 2 * page["sums"] * page["measured_sum"]["16 × A100, two servers"][1] > 2


def test_one_request_is_sooner_by_tensor_parallelism_and_many_by_replicas(page, lab):
    predicted = {key.removesuffix("_predicted"): s for key, s in lab.items() if key.endswith("_predicted")}
    ways = ("TP2", "PP2", "DP2")
    assert min(ways, key=lambda way: predicted[f"{way}_one"]) == "TP2"
    assert min(ways, key=lambda way: predicted[f"{way}_many"]) == "DP2"
    assert predicted["PP2_many_far"] < predicted["TP2_many_far"]
    assert all(lab[name] > 0.8 * seconds for name, seconds in predicted.items())  # waits are waited for
    assert lab["DP2_many"] < lab["one_rank_many"]
    assert lab["weights_tp2"] < 0.51 * lab["weights_one"]


def test_chunks_alone_make_the_pause_longer_and_mixing_ends_it(page, lab, drawn):
    assert lab["pause_chunks_first"] > 1.1 * lab["pause_whole_first"] > 10 * lab["pause_mixed"]
    budgets = (64, 256, 512, 2048, 8192)
    assert all(lab[f"worst_{a}"] < lab[f"worst_{b}"] for a, b in pairwise(budgets))
    assert all(lab[f"waited_{a}"] > lab[f"waited_{b}"] for a, b in pairwise(budgets))
    for name, key in (("whole prompt first", "whole_first"), ("in chunks of 512, first", "chunks_first"),
                      ("512 a step, answers first", "mixed")):
        _, answers = drawn.waited()[name]
        worst = max(b - a for answer in answers[:8] for a, b in pairwise(answer.times))
        assert worst == pytest.approx(lab[f"pause_{key}"])
    assert page["step"]([(1, 300)] * 8) == drawn.STEP([(1, 300)] * 8) == pytest.approx(lab["usual"])


def test_the_drawn_tables_share_full_blocks_only(drawn):
    first, second, _ = drawn.tables()
    assert (first, second) == ([3, 0, 5], [3, 0, 1])


def test_keeping_blocks_free_has_fewer_give_way_and_later_first_tokens(lab):
    assert lab["preempted_enough"] == 0 < lab["preempted_spared"] < lab["preempted_tight"]
    assert lab["computed_enough"] == 564 < lab["computed_spared"] < lab["computed_tight"]
    assert lab["first_spared"] > lab["first_tight"] and lab["pause_spared"] < lab["pause_tight"]


def test_replicas_need_load(page):
    replicas, together = page["replicas"], page["together"]
    assert together(1) > 2 * replicas(1) and together(64) > 1.5 * replicas(64)
    assert page["many"] <= page["room8"] and replicas(page["many"]) > 1.2 * together(page["many"])


def test_the_cards_room_is_over_the_cards_part(page):
    fits = page["fits"]
    assert fits(8).requests > 1.3 * 2 * fits(4).requests
    assert fits(16).requests < 1.2 * fits(8).requests
    assert 0 < page["room"] < 1500
    assert (page["v3_fits"].layout.world_size, page["unit"].ep) == (320, 320)
