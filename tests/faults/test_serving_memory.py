"""FAULTS.md SV1–SV4, SV8, SV10: what serving needs, decided before anything is started. Their first half is in
tests/cost/test_kv.py and test_ladder.py; here are the published cases, and the whole kind of each fault."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab import cost
from shardlab.cost import Serve, forward_peak, kv_cache, kv_per_token, ladder, memory, requests_that_fit, serving
from shardlab.cost.step import tensor_degrees
from shardlab.specs import CardSpec, Layout, ModelSpec, bundled_models, find_card, find_model

GIB, KIB = 2**30, 2**10
EIGHT, SEVENTY, V3 = (find_model(name) for name in ("llama-3.1-8b", "llama-3.1-70b", "deepseek-v3"))
H100 = find_card("h100")
RTX3090 = CardSpec(name="rtx-3090", printed=24 * 10**9, usable=int(23.58 * GIB), hbm=936e9, flops={"bf16": 71e12},
                   host_link="pcie4", source="vllm#10517 for what the driver reports", date="2020-09")
BLOCK = 16  # tokens
HYBRIDS = ("gpt-oss-120b", "deepseek-v4-pro")
UNIFORM = [name for name in bundled_models() if name not in HYBRIDS]


# SV1: how many tokens a prompt's pass may have decides what is left for caches


@pytest.mark.parametrize(("context", "chunk", "peak", "left", "blocks"), [
    (20_000, 20_000, 17.06, 3.81, 1952), (29_000, 29_000, 17.98, 2.89, 1478), (35_000, 512, 15.05, 5.82, 2980)])
def test_sv1_a_shorter_context_may_fail_where_a_longer_one_works(context, chunk, peak, left, blocks):
    """vllm#10517: on 24 GB, 20k works, 29k fails, 35k works, since above 32k prompts are cut into chunks."""
    bill = serving(EIGHT, context=context, chunk=chunk, reserve="0.35 GiB")
    assert (bill.weights + bill.part("activations")) / GIB == pytest.approx(peak, rel=5e-3)
    beside = bill.per_rank - bill.part("KV cache")
    free = int(0.9 * RTX3090.memory) - beside
    assert free / GIB == pytest.approx(left, rel=0.03)
    assert requests_that_fit(free, EIGHT, BLOCK) == pytest.approx(blocks, rel=0.03)
    assert requests_that_fit(free, EIGHT, context) == (0 if context == 29_000 else 1)
    assert (bill.per_rank > 0.9 * RTX3090.memory) == (context == 29_000)


def test_sv1_blocks_and_tokens_of_the_published_log():
    free = [int((0.90 * 23.58 - peak - 0.35) * GIB) for peak in (17.06, 17.98, 15.05)]
    assert [requests_that_fit(f, EIGHT, BLOCK) for f in free] == pytest.approx([1952, 1478, 2980], abs=2)
    tokens = 1478 * BLOCK
    assert tokens == 23_648 and round(tokens / 29_000, 2) == 0.82
    assert requests_that_fit(1478 * kv_cache(EIGHT, BLOCK), EIGHT, tokens) == 1
    assert requests_that_fit(1478 * kv_cache(EIGHT, BLOCK), EIGHT, tokens + 1) == 0


def test_sv1_a_batched_token_takes_about_107_kib_of_activations():
    more = forward_peak(EIGHT, tokens=29_000, logits=1) - forward_peak(EIGHT, tokens=20_000, logits=1)
    assert more / 9_000 / KIB == pytest.approx(107, rel=0.02)


# SV2: what binds is named, and the cheapest lever that helps comes first


@settings(deadline=None, max_examples=60)
@given(gib=st.integers(4, 200), context=st.sampled_from([512, 8192, 131_072]), n=st.sampled_from([1, 7, 64]))
def test_sv2_the_term_that_is_named_is_the_one_that_binds(gib, context, n):
    card = replace(H100, physical=None, usable=gib * GIB)
    first = ladder(EIGHT, card, Serve(context=context, concurrency=n, latency=10)).steps[0]
    bill = serving(EIGHT, context=context, concurrency=n)
    beside = bill.per_rank - bill.part("KV cache")
    if "the weights bind" in first.why:
        assert bill.weights > card.memory
    elif "the cache binds" in first.why:
        fit = int(first.why.split(" of ")[0])
        held = [serving(EIGHT, context=context, concurrency=requests).per_rank for requests in (fit, fit + 1)]
        assert held[0] <= card.memory < held[1] and 0 < fit < n
    elif "less than one request's cache" in first.why:
        assert bill.weights < card.memory < serving(EIGHT, context=context).per_rank
    elif "before any request" in first.why:
        assert bill.weights <= card.memory <= beside
    else:
        assert (first.does, bill.per_rank <= card.memory) == ("yes", True)


@pytest.mark.parametrize(("card", "task", "binds", "lever"), [
    (replace(RTX3090, usable=14 * GIB), Serve(), "the weights bind", "fewer bits, int8"),
    (RTX3090, Serve(concurrency=8), "the cache binds", "fewer bits, bf16, fp8 cache"),
    (RTX3090, Serve(concurrency=16), "the cache binds", "fewer bits, int8, fp8 cache"),
    (replace(RTX3090, usable=8 * GIB), Serve(context=2048, latency=2), "the weights bind", "offload"),
])
def test_sv2_the_cheapest_lever_is_taken(card, task, binds, lever):
    """vllm#2248, #4429: weights in fewer bits, a smaller cache, the host, another card, then more of them."""
    plan = ladder(EIGHT, card, task)
    assert binds in plan.steps[0].why
    assert plan.chosen.name == lever
    before = plan.steps[: plan.steps.index(plan.chosen)]
    assert all(step.does != "yes" for step in before)
    more = replace(card, physical=None, usable=plan.steps[0].nbytes)  # and a card with just the room needs no lever
    assert ladder(EIGHT, more, task).steps[0].does == "yes"


# SV3: what does not fit is said to


@pytest.mark.parametrize(("spec", "card", "cards", "context"), [
    (SEVENTY, H100, 2, 131_072), (V3, H100, 1, 8192), (EIGHT, replace(RTX3090, usable=2 * GIB), 1, 8192)])
def test_sv3_no_room_is_no_concurrency_of_zero(spec, card, cards, context):
    """lm-evaluation-harness#2431: 65.7 GiB of weights a rank, no block left, "Maximum concurrency 0.00x"."""
    plan = ladder(spec, card, Serve(context=context, dtype="bf16", latency=1e-4), cards)
    assert plan.chosen is None or plan.chosen.does == "would"
    assert any("does not fit" in step.why for step in plan.steps)
    said = f"{plan} {plan.answer} {plan._repr_html_()}"
    assert not re.search(r"\b0\.00|\b0x|\b0 of |\b0 requests", said)


def test_sv3_the_published_case_by_its_numbers():
    half = memory(SEVENTY, Layout(2), "bf16")
    assert half.weights / GIB == pytest.approx(65.74, rel=1e-3)
    assert requests_that_fit(H100.memory - half.weights, SEVENTY, 131_072, Layout(2)) == 0
    with pytest.raises(ValueError, match="concurrency must be a whole number of at least 1, not 0"):
        serving(SEVENTY, Layout(2), context=131_072, concurrency=0)


# SV4: tokens and requests agree


@settings(deadline=None, max_examples=60)
@given(name=st.sampled_from(UNIFORM), free=st.integers(0, 200 * GIB), context=st.integers(1, 131_072))
def test_sv4_requests_are_tokens_over_their_length(name, free, context):
    """vllm#40691: 290,864 tokens and 33.04 requests of 32,768, though the one would be 8.88 of the other."""
    spec = find_model(name)
    tokens = free // kv_per_token(spec)
    assert requests_that_fit(free, spec, context) == tokens // context


def test_sv4_hybrids_are_counted_by_the_request():
    for name in HYBRIDS:
        spec = find_model(name)
        free = 33 * kv_cache(spec, 32_768)
        assert requests_that_fit(free, spec, 32_768) == 33 == requests_that_fit(free + 1, spec, 32_768)
        assert requests_that_fit(free - 1, spec, 32_768) == 32


# SV8: a cache is counted from its KV heads


@pytest.mark.parametrize("name", [name for name in UNIFORM if name != "deepseek-v3"])
def test_sv8_hidden_size_and_query_heads_do_not_size_the_cache(name):
    """vllm-fit#14, vllm#29736: from hidden_size, an 8B is 4 times and a 70B 8 times too large."""
    spec = find_model(name)
    assert kv_per_token(spec) == spec.layers * 2 * spec.kv_heads * spec.head_dim * 2
    assert kv_per_token(replace(spec, hidden=2 * spec.hidden, heads=2 * spec.heads)) == kv_per_token(spec)
    by_hidden = spec.layers * 2 * spec.hidden * 2
    ratio = spec.heads / spec.kv_heads
    assert by_hidden / kv_per_token(spec) == pytest.approx(ratio * spec.hidden / (spec.heads * spec.head_dim))


# SV10: heads that a degree does not divide are refused where it is planned

FOUR = ModelSpec(hidden=64, layers=2, heads=24, kv_heads=4, head_dim=16, ffn=90, vocab=101)


@pytest.mark.parametrize("tp", [3, 6, 7, 16, 64])
def test_sv10_half_a_head_is_refused_by_every_account(tp):
    """transformers#48307, exo#1669: 4 KV heads on TP 8 left half a head a rank. There copies do; on 3 or 6 ranks, which
    divide the 24 query heads, nothing does."""
    layout = Layout(tp)
    for account in (lambda: memory(FOUR, layout), lambda: serving(FOUR, layout, context=99),
                    lambda: cost.training(FOUR, layout, batch=1, seq=9), lambda: cost.traffic(FOUR, layout, 1, 9),
                    lambda: kv_cache(FOUR, 99, layout), lambda: requests_that_fit(GIB, FOUR, 99, layout),
                    lambda: forward_peak(FOUR, layout, tokens=9)):
        with pytest.raises(ValueError, match=f"tp = {tp} does not cut the 24 heads .*tp can be 1, 2, 4, 8, 12, 24"):
            account()


def test_sv10_the_ladder_proposes_no_such_degree():
    assert {tp for cards in range(2, 9) for tp in tensor_degrees(FOUR, H100, cards)} == {2, 4, 8}
    assert kv_per_token(FOUR, Layout(8)) == kv_per_token(FOUR, Layout(4)) == FOUR.layers * 2 * 16 * 2
