"""FAULTS.md SV6, SV12–SV14, SV21–SV23, SV28, SV32, SV33, and what SV1–SV4, SV8 and SV10 ask of the planner: how many
cards serve a load, and cut how. The accounts themselves are in test_serving_memory.py and tests/cost."""

import re
from dataclasses import replace

import pytest

from shardlab.cost import (
    Load,
    Pools,
    Role,
    Speeds,
    best_split,
    capacity,
    colocated,
    concurrency,
    decode_pool,
    handover,
    kv_handed,
    kv_per_token,
    layouts_of,
    prefill_pool,
    serve_step,
    serving,
    why_not,
    why_not_split,
)
from shardlab.cost.why_not import alone
from shardlab.specs import CardSpec, ClusterSpec, Layout, ModelSpec, find_card, find_link, find_model

GIB = 2**30
EIGHT, THIRTEEN, SEVENTY, V3 = (find_model(name) for name in ("llama-3.1-8b", "llama-2-13b", "llama-3.1-70b",
                                                              "deepseek-v3"))
A100, H100, B200 = (find_card(name) for name in ("a100", "h100", "b200"))
CHAT = Load(rate=1, prompt=1000, answer=200)
NIC = find_link("ib-ndr")
RTX3090 = CardSpec(name="rtx-3090", printed=24 * 10**9, usable=int(23.58 * GIB), hbm=936e9, flops={"bf16": 71e12},
                   host_link="pcie4", source="vllm#10517 for what the driver reports", date="2020-09")


def on_one(spec, card):
    return serve_step(spec, None, alone(card))


# SV1–SV4, SV8, SV10: the accounts' answers reach the plan


@pytest.mark.parametrize(("context", "chunk", "tokens"), [(20_000, 20_000, 31_232), (29_000, 29_000, 23_648),
                                                          (35_000, 512, 47_680)])
def test_sv1_the_longest_request_depends_on_the_chunk(context, chunk, tokens):
    """vllm#10517: 20k works, 29k fails, 35k works, which is cut into chunks."""
    found = concurrency(EIGHT, RTX3090, context=context, chunk=chunk, share=0.9, reserve="0.35 GiB")
    assert found.longest == pytest.approx(tokens, rel=0.03)
    assert (found.requests == 0) == (found.longest < context) == (context == 29_000)


def test_sv2_sv3_what_binds_is_named_and_no_concurrency_is_zero():
    """vllm#2248, lm-evaluation-harness#2431: 65.74 GiB of weights a rank, and "Maximum concurrency 0.00x"."""
    half = concurrency(SEVENTY, H100, Layout(2), context=131_072)
    assert half.weights / GIB == pytest.approx(65.74, rel=1e-3) and half.binds == "cache"
    plan = capacity(SEVENTY, H100, replace(CHAT, prompt=131_000, answer=72), cards=2)
    assert plan.answer == ("no layout on 2 × h100 holds a request of 131,072 tokens: with tp = 2, the longest that "
                           f"fits has {half.longest:,}")
    for said in (str(half), str(plan), plan._repr_html_()):
        assert re.search("[Dd]oes not fit", said) and not re.search(r"\b0\.00|\b0x|\b0 at once|\b0 requests", said)


def test_sv4_tokens_are_requests_times_their_length():
    for spec in (EIGHT, THIRTEEN, SEVENTY, V3):
        found = concurrency(spec, B200, Layout(8), context=2048, dtype="fp8")
        assert found.tokens == found.requests * 2048
        assert abs(found.free / kv_per_token(spec, Layout(8)) - found.tokens) < 2048 + 100


def test_sv8_sv10_heads_size_what_is_held_and_sent_and_tried():
    """Caches by KV heads, not by hidden_size; a tp that would leave half a head is not tried."""
    assert kv_handed(EIGHT, 1) == 131_072 != 524_288 and kv_handed(SEVENTY, 1) == 327_680 != 2_621_440
    four = ModelSpec(hidden=64, layers=2, heads=24, kv_heads=4, head_dim=16, ffn=90, vocab=101)
    assert {layout.tp for layout in layouts_of(four, H100, 8)} == {1, 2, 4, 8}
    for wrong in (lambda: concurrency(four, H100, Layout(3), context=9), lambda: kv_handed(four, 9, Layout(6)),
                  lambda: serve_step(four, Layout(3), ClusterSpec.of("h100", 3))):
        with pytest.raises(ValueError, match="does not cut the 24 heads"):
            wrong()


# SV6: what can never fit is refused, with what would


def test_sv6_prompt_and_answer_count_together():
    """vllm#52530: 1,000 tokens of prompt and 24 of answer, against 1,008 that can be served: refused, not retried."""
    tight = replace(H100, physical=None, usable=serving(EIGHT, context=10_008).per_rank)
    short, long = (replace(CHAT, prompt=10_000, answer=answer) for answer in (8, 24))
    fits, longer = (concurrency(EIGHT, tight, context=load.longest) for load in (short, long))
    assert (fits.requests, longer.requests) == (1, 0) and fits.longest == longer.longest == 10_008
    assert "the longest request that does has 10,008 tokens" in str(longer)
    assert why_not(EIGHT, tight, long).reason == "does not fit" != why_not(EIGHT, tight, short).reason
    refused = capacity(EIGHT, tight, long, cards=1)
    assert not refused.options and refused.answer.endswith("the longest that fits has 10,008")


# SV12: a latent is whole on every rank of a tensor axis


def test_sv12_data_ranks_hold_several_times_the_latents_that_tensor_ranks_do():
    """vllm#51454: DP 8 with EP holds 7.68 times the KV of TP 8 on 8 B200. It is 8 times, less what the attention's
    weights take that are then whole on each card."""
    tensor, data = (concurrency(V3, B200, layout, context=4096, dtype="fp8", share=0.9)
                    for layout in (Layout(8), Layout(dp=8, ep=8)))
    assert tensor.each == data.each == tensor.whole / 8
    assert data.total / tensor.total == pytest.approx(8 * data.free / tensor.free, rel=0.01)
    assert 6 < data.total / tensor.total < 8 and tensor.weights < data.weights < 1.25 * tensor.weights


def test_sv12_the_planner_gives_latents_their_data_ranks_and_heads_their_tensor_ranks():
    busy = Load(rate=40, prompt=2000, answer=500, ttft=2, tpot=0.1)
    plan = capacity(V3, B200, busy, cards=8, dtype="fp8")
    assert (plan.chosen.layout.dp, plan.chosen.layout.ep, plan.chosen.layout.tp) == (8, 8, 1)
    by = {one.layout: one for one in plan.options}
    assert by[Layout(dp=8, ep=8)].per_card > 1.2 * by[Layout(8)].per_card
    assert by[Layout(dp=8, ep=8)].room.total > 5 * by[Layout(8)].room.total


# SV13: what fits is copied for throughput and cut for the time of one


def test_sv13_copies_win_throughput_and_a_cut_wins_one_streams_tokens():
    """vllm#293, #367, #1873: TP 4 of a 13B gave no more tokens; the maintainers' answer is copies."""
    plan = capacity(THIRTEEN, A100, replace(CHAT, rate=60, prompt=500), cards=4, sync=26e-6)
    options = sorted(plan.options, key=lambda one: one.layout.tp)
    assert [one.layout.tp for one in options] == [1, 2, 4]
    assert options[0].per_card > options[1].per_card > options[2].per_card
    assert options[0].tpot > options[1].tpot > options[2].tpot and plan.chosen is options[0]
    for row in plan.rows:  # and both are said
        assert "a card" in row.derivation and "a request alone" in row.derivation


def test_sv13_the_floor_says_more_cards_and_the_measurement_says_not_for_ever():
    """8B on an H100: 4.79 ms a token at least on one card, 1.1 ms on eight with sums of 8 µs. With NCCL's as they were
    measured, 29 µs, eight gain little over four."""
    full = Speeds(share=1, memory=1, links=1)

    def token(tp, sync):
        cluster = ClusterSpec.of("h100", tp) if tp > 1 else alone(H100)
        return 1000 * serve_step(EIGHT, Layout(tp), cluster, speeds=full, sync=sync)([(1, 1)])

    assert token(1, 8e-6) == pytest.approx(4.79, rel=0.07) and token(8, 8e-6) == pytest.approx(1.1, rel=0.05)
    assert token(8, 29e-6) > 2 * token(8, 8e-6)
    assert token(4, 29e-6) / token(8, 29e-6) < 1.25 < 1.5 < token(4, 8e-6) / token(8, 8e-6)


# SV14: a pipeline's decode waits for latency


def test_sv14_twice_the_bandwidth_between_nodes_changes_nothing_for_a_decoding_pipeline():
    """vllm#6610: two nodes, 8 cards each, a pipeline of two."""
    work = [(1, 2000)] * 32
    slow, fast = (serve_step(SEVENTY, Layout(8, pp=2), ClusterSpec.of("h100", 16, replace(NIC, per_direction=rate)))
                  for rate in (50e9, 100e9))
    assert 0 < slow(work) / fast(work) - 1 < 1e-3
    prompt = [(8192, 8192)]
    whole, twice = (serve_step(SEVENTY, Layout(16), ClusterSpec.of("h100", 16, replace(NIC, per_direction=rate)))
                    for rate in (50e9, 100e9))
    assert whole(prompt) / twice(prompt) > 1.1  # a prompt cut over both is another matter


# SV21–SV23: two pools, on as many cards as one


def split(load, instances, spec=EIGHT, card=H100, most=200):
    step = on_one(spec, card)
    moved = handover(spec, load.prompt, prefill=step([(load.uncached, load.prompt)]), link=NIC)
    return why_not_split(step, load, moved, instances=instances, most=most)


@pytest.mark.parametrize("limits", [{}, {"ttft": 0.5, "tpot": 0.05}, {"ttft": 0.2, "tpot": 0.03, "gap": 0.05}])
def test_sv21_1024_in_and_50_out_on_two_cards_is_one_pool(limits):
    """vllm#11345, #23144, Mooncake#5: one card each loses to chunked prefill on both."""
    found = split(Load(rate=50, prompt=1024, answer=50, **limits), 2)
    assert found.answer.startswith("colocate: ") and found.one > found.two > 0
    assert "enough instances" in found.failed


def test_sv21_one_to_one_is_even_only_where_prompts_and_answers_take_as_long():
    def lost(answer):
        found = split(Load(rate=50, prompt=1024, answer=answer), 2)
        return found.two / found.one

    even = [lost(answer) for answer in (10, 50, 320, 3000)]
    assert max(even) == even[2] > 0.9 and even[1] < 0.65 and even[3] < 0.6


def test_sv22_where_prompts_are_a_fortieth_of_the_work_one_to_one_is_the_worst():
    """sglang-omni#1599: a prefill card 10% busy, beside 68% where one does both."""
    load, step = Load(rate=1, prompt=100, answer=5000), on_one(EIGHT, H100)
    prompts, answers = prefill_pool(step, load), decode_pool(step, load, 100)
    share = (1 / prompts.rate) / (1 / prompts.rate + 1 / answers.rate)
    assert share < 0.03
    every = [min(n * prompts.rate, (40 - n) * answers.rate) for n in range(1, 40)]
    assert best_split(prompts.rate, answers.rate, 40) == (1, every[0]) and every[19] < 0.55 * every[1]
    assert split(load, 2, most=100).two < 0.55 * split(load, 2, most=100).one


@pytest.mark.parametrize(("prompt", "answer"), [(32_000, 512), (100_000, 200)])
def test_sv23_halving_the_prefill_pool_of_a_load_of_prompts_loses(prompt, answer):
    """vllm#41834, sglang#24488: loads bound by prompts gain nothing from cards that make answers alone."""
    load, step = Load(rate=1, prompt=prompt, answer=answer), on_one(EIGHT, H100)
    prompts, answers = prefill_pool(step, load), decode_pool(step, load, 4 if prompt > 50_000 else 15)
    assert prompts.rate < answers.rate
    n, best = best_split(prompts.rate, answers.rate, 8)
    assert n >= 4 and min(n // 2 * prompts.rate, (8 - n // 2) * answers.rate) <= 0.75 * best
    assert split(load, 8, most=4 if prompt > 50_000 else 15).two <= 8 * colocated(
        step, load, 4 if prompt > 50_000 else 15).rate


# SV28: rates are a role's own, and say of what


def test_sv28_each_roles_tokens_are_divided_by_its_own_cards():
    """InferenceX#131, #293: input tokens a second over all GPUs, and "generated" ones with the input among them."""
    pools = Pools(Role(10_000, 5_000, 8), Role(1_000, 125, 4))
    assert (pools.prefill.per_card, pools.decode.per_card) == (5_000 / 8, 125 / 4)
    assert pools.prefill.per_card != 10_000 / pools.cards and pools.decode.per_card != 1_000 / pools.cards
    spent = pools.per_million("in") * 0.01 + pools.per_million("out") * 0.001  # a second's tokens, in millions
    assert spent == pytest.approx(pools.cards * pools.price / 3600)
    for row in pools.rows[:2]:
        assert re.search(r"tokens/s (in|out) ÷", row.derivation) and re.search(r"tokens/s (in|out)$", row.note)
    assert [row.label for row in pools.rows[3:6]] == ["a million in", "a million out", "a million total"]


# SV32: an instance's cards


@pytest.mark.parametrize(("layout", "cards"), [
    (Layout(cp=8), 8), (Layout(dp=8, ep=8), 8), (Layout(2, pp=3, dp=4, cp=5), 120), (Layout(4, dp=8, etp=1, ep=32), 32),
    (Layout(4, dp=80, etp=1, ep=320), 320)])
def test_sv32_an_instance_is_all_its_axes_but_the_experts(layout, cards):
    """aiconfigurator#1476: a prefill worker of cp 8 counted as one GPU."""
    role = Role.of(1000, 100, layout)
    assert role.cards == cards and role.per_card == 100 / cards and role.instances == 10


# SV33: copies shorten no request


def test_sv33_a_prompt_that_takes_too_long_is_not_answered_with_replicas():
    """dynamo#11624: replicas = ceil(TTFT / target)."""
    load = Load(rate=0.1, prompt=30_000, answer=100, ttft=0.5)
    found = why_not(EIGHT, H100, load)
    assert found.reason == "latency" and "copies do not shorten it" in found.remedy
    assert on_one(EIGHT, H100)([(30_000, 30_000)]) > 0.5
    plan = capacity(EIGHT, H100, load, cards=8)
    assert next(one for one in plan.options if one.layout.tp == 1).copies == 0 and plan.chosen.layout.tp > 1
    hopeless = capacity(EIGHT, H100, replace(load, ttft=0.05), cards=8)
    assert hopeless.chosen is None and "change the cut (tp), the bits or the card" in hopeless.answer
    for copies in (1, 7):  # however little is asked for, however many copies
        assert capacity(EIGHT, H100, replace(load, rate=0.001 / copies), cards=1).chosen is None


@pytest.mark.parametrize("plan", [why_not, capacity])
def test_no_number_of_cards_reads_more_than_the_model_was_made_for(plan):
    """A prompt beyond its positions is refused, whatever memory there is."""
    with pytest.raises(ValueError, match=r"131,072 \+ 2 tokens, .* made for 131,072: no number of cards helps"):
        plan(EIGHT, H100, Load(rate=1, prompt=131_072, answer=2))
    assert plan(EIGHT, H100, Load(rate=1, prompt=131_072, answer=1))
