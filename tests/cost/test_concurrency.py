"""Requests at once: a card's room over a card's share, the same number seen from the whole group, and what binds."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.cost import concurrency, kv_cache, kv_per_token, memory, preempted, serving
from shardlab.specs import Layout, find_card, find_link, find_model

GIB = 2**30
EIGHT, SEVENTY, V3, OSS = (find_model(name) for name in ("llama-3.1-8b", "llama-3.1-70b", "deepseek-v3",
                                                         "gpt-oss-120b"))
H100, H800 = find_card("h100"), find_card("h800")
BY_EIGHT = Layout(8)


def room_of(gib, found):
    """A card that has so many GiB left for caches."""
    return replace(H100, physical=None, usable=int(gib * GIB) + found.weights + found.beside)


def test_sixty_four_gib_a_card_are_204_requests_and_not_twenty_odd():
    """2.5 GiB is what eight cards cache for a request, 0.3125 GiB what one does."""
    found = concurrency(SEVENTY, H100, BY_EIGHT, context=8192)
    assert (found.each / GIB, found.whole / GIB) == (0.3125, 2.5)
    more = concurrency(SEVENTY, room_of(64, found), BY_EIGHT, context=8192)
    assert (64 * GIB) // found.each == 204 == more.requests == more.total
    assert (64 * GIB) // found.whole == 25


def test_of_90_percent_with_2_gib_of_work_171_are_left():
    requests = (0.9 * 80 - 140e9 / 8 / GIB - 2) / 0.3125
    assert requests == pytest.approx(171.8, abs=0.1)
    less = concurrency(SEVENTY, find_card("a100"), BY_EIGHT, context=8192, share=0.9, reserve="1.86 GiB")
    assert less.requests == pytest.approx(171, abs=1)


@settings(deadline=None, max_examples=25)
@given(tp=st.sampled_from([2, 4, 8, 16]), context=st.sampled_from([512, 8192, 131_072]), kv=st.sampled_from(
    ["bf16", "fp8", "int8"]))
def test_a_group_holds_what_one_of_its_cards_does(tp, context, kv):
    found = concurrency(SEVENTY, H100, Layout(tp), context=context, kv_dtype=kv, dtype="fp8")
    assert found.whole == tp * found.each == tp * kv_cache(SEVENTY, context, Layout(tp), kv)
    held = [serving(SEVENTY, Layout(tp), context=context, concurrency=n, kv_dtype=kv, dtype="fp8").per_rank
            for n in (found.requests, found.requests + 1)]
    assert held[0] <= H100.memory < held[1]
    assert found.tokens == found.requests * context


def test_beyond_the_kv_heads_a_cards_share_stops_shrinking():
    each = [concurrency(SEVENTY, H100, Layout(tp), context=8192).each for tp in (4, 8, 16)]
    assert each[0] == 2 * each[1] == 2 * each[2]
    assert concurrency(SEVENTY, H100, Layout(16), context=8192).whole == 5 * GIB


def test_data_ranks_have_requests_of_their_own():
    one, two = (concurrency(SEVENTY, H100, Layout(4, dp=dp), context=8192) for dp in (1, 2))
    assert (one.requests, one.total, two.total) == (two.requests, one.requests, 2 * one.requests)
    assert "on each of 2 data ranks" in str(two)


def test_a_stage_caches_its_own_layers():
    whole, half = (concurrency(SEVENTY, H100, Layout(8, pp=pp), context=8192) for pp in (1, 2))
    assert 2 * half.each == whole.each and half.whole == whole.whole
    assert half.weights == max(memory(SEVENTY, Layout(8, pp=2), "bf16", rank=r).weights for r in (0, 8))
    assert half.requests > 2 * whole.requests
    uneven = concurrency(replace(SEVENTY, layers=81), H100, Layout(8, pp=2), context=8192)
    assert uneven.each == 41 * uneven.whole // (81 * 8)  # the stage with 41 layers is full first
    with pytest.raises(ValueError, match="pp = 2: the layers of gpt-oss-120b don't all cache alike"):
        concurrency(OSS, H100, Layout(8, pp=2), context=8192)


def test_what_the_host_keeps_makes_room_and_has_to_be_fetched():
    here, away = (concurrency(EIGHT, H100, context=8192, host_kv=share) for share in (0.0, 0.5))
    assert away.requests == pytest.approx(2 * here.requests, rel=0.01)
    pcie = find_link("pcie5")
    assert here.fetched() == 0
    assert away.fetched() == pytest.approx(away.requests * away.each / 2 / pcie.per_direction)
    assert away.fetched(find_link("pcie4")) == pytest.approx(2 * away.fetched(), rel=0.01)
    with pytest.raises(ValueError, match=r"gb200 names no link to its host: give one, link=find_link"):
        concurrency(EIGHT, find_card("gb200"), context=8192, host_kv=0.5).fetched()


def test_what_does_not_fit_is_said_to():
    small = room_of(1, concurrency(SEVENTY, H100, context=8192))
    for card, binds, said in ((H100, "weights", "the weights bind."),
                              (small, "cache", "the cache binds; the longest request that does has 3,276 tokens.")):
        found = concurrency(SEVENTY, card, context=8192)
        assert (found.requests, found.binds) == (0, binds)
        assert f"Does not fit: {said}" in str(found) and "at once\n" not in str(found).split("\n", 1)[1]
    full = concurrency(SEVENTY, H100, context=8192)
    work = concurrency(SEVENTY, replace(H100, physical=None, usable=full.weights + 10**6), context=8192)
    assert (work.binds, work.free < 0) == ("work", True) and "missing" in str(work)


@settings(deadline=None, max_examples=25)
@given(gib=st.floats(0.1, 40), pp=st.sampled_from([1, 2]), kv=st.sampled_from(["bf16", "int8"]))
def test_the_longest_request_fits_and_one_token_more_does_not(gib, pp, kv):
    card, layout = room_of(gib, concurrency(EIGHT, H100, Layout(pp=pp), context=4000)), Layout(pp=pp)
    found = concurrency(EIGHT, card, layout, context=4000, kv_dtype=kv)
    per_token = kv_per_token(EIGHT, dtype=kv) / pp
    assert found.longest == min(int(found.free / per_token), EIGHT.max_positions)


def test_copies_of_experts_take_room_and_cache_nothing():
    """DeepSeek-V3's decode unit: 320 cards with one expert each, 64 of them copies (arXiv:2412.19437, §3.4.2)."""
    unit = Layout(4, dp=80, etp=1, ep=320)
    found = concurrency(V3, H800, unit, context=5000, dtype="fp8", redundant=64)
    assert found.each == kv_cache(V3, 5000) and found.requests > 100
    with pytest.raises(ValueError, match="ep = 320 does not share out the 256 experts"):
        concurrency(V3, H800, unit, context=5000, dtype="fp8")


def test_the_published_decode_service_has_room_for_its_tokens():
    """Little: 705 streams on a node of 8, of 4,989 tokens on average: 439,500 tokens on each card."""
    found = concurrency(V3, H800, Layout(dp=144, ep=144), context=4989, dtype="fp8", redundant=32)
    assert found.tokens > 439_500 and found.free > 439_500 * kv_per_token(V3)


def test_the_account_is_plain_data_too():
    found = concurrency(SEVENTY, H100, BY_EIGHT, context=8192)
    data = found.to_dict()
    assert (data["requests"], data["total"], data["binds"], data["tp"]) == (found.requests, found.total, "cache", 8)
    assert [row["label"] for row in data["rows"]][-1] == "requests"


@pytest.mark.parametrize(("wrong", "said"), [
    ({"share": 1.1}, "share = 1.1 is a part of the card's memory: 1 at most"),
    ({"share": 0}, "share must be a number above 0"), ({"context": 0}, "context must be a whole number"),
    ({"host_kv": 2}, "host_kv = 2 is a share of the cache"), ({"layout": Layout(3)}, "tp = 3 does not cut"),
    ({"layout": Layout(dp=2, zero=1)}, "leave zero and sp out"), ({"kv_dtype": "int7"}, "unknown dtype 'int7'")])
def test_what_is_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        concurrency(SEVENTY, H100, **{"context": 8192, **wrong})


def test_a_preempted_request_is_swapped_in_one_piece_and_computed_again_where_pieces_cost():
    found = preempted(SEVENTY, H100, BY_EIGHT, tokens=8192, recompute=0.314)
    pcie = find_link("pcie5")
    assert found.nbytes == kv_cache(SEVENTY, 8192, BY_EIGHT)
    assert found.swap == pytest.approx(2 * (found.nbytes / pcie.per_direction + pcie.alpha))
    assert found.cheaper == "swap"
    paged = preempted(SEVENTY, H100, BY_EIGHT, tokens=8192, recompute=0.314, block=16)
    assert paged.swap - found.swap == pytest.approx(2 * pcie.alpha * (512 * 80 - 1))
    slow = replace(pcie, alpha=10e-6)  # what a small copy really costs, from the program that asks for it
    assert preempted(SEVENTY, H100, BY_EIGHT, tokens=8192, recompute=0.314, block=16, link=slow).cheaper == "recompute"
    assert preempted(SEVENTY, H100, BY_EIGHT, tokens=8192, recompute=0.314, block=256, link=slow).cheaper == "swap"
    with pytest.raises(ValueError, match="block must be a whole number"):
        preempted(SEVENTY, H100, tokens=99, recompute=1, block=0)


def test_int8_has_a_scale_for_each_token_and_head():
    for spec in (EIGHT, SEVENTY, find_model("qwen2.5-7b")):
        assert kv_per_token(spec, dtype="int8") / kv_per_token(spec) == (spec.head_dim + 2) / (2 * spec.head_dim)
    assert (128 + 2) / (2 * 128) == 0.5078125
    assert kv_per_token(V3, dtype="int8") == V3.layers * (512 + 2 + 64 + 2)
    assert kv_cache(OSS, 500, dtype="int8") / kv_cache(OSS, 500) == (64 + 2) / (2 * 64)
    with pytest.raises(ValueError, match="or fp8, or int8"):
        kv_per_token(V3, dtype="int9")
