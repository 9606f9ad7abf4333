"""A step's time: its floors, what binds it, its collectives one by one, and published steps."""

import math
from dataclasses import replace

import pytest

from shardlab.cost import (
    Speeds,
    attention_flops,
    collective_seconds,
    decode_floor,
    fit_steps,
    kv_per_token,
    memory,
    prefill_floor,
    serve_step,
    traffic,
)
from shardlab.cost.serve_parts import seen
from shardlab.cost.why_not import alone
from shardlab.specs import ClusterSpec, Layout, LinkSpec, find_card, find_link, find_model

EIGHT, SEVENTY, V3, OSS = (find_model(name) for name in ("llama-3.1-8b", "llama-3.1-70b", "deepseek-v3",
                                                         "gpt-oss-120b"))
FULL = Speeds(share=1, memory=1, links=1)
MIB = 2**20


def step_of(spec, layout=None, card="h100", cards=None, **how):
    layout = layout or Layout()
    return serve_step(spec, layout, ClusterSpec.of(card, cards or layout.world_size), **{"speeds": FULL, **how})


@pytest.mark.parametrize("spec", [EIGHT, SEVENTY], ids=lambda spec: spec.name)
@pytest.mark.parametrize("tp", [1, 4, 8])
def test_decodes_take_what_memory_takes_to_be_read(spec, tp):
    """Without its messages a step is `decode_floor`, to the norms; with them it is more."""
    step = step_of(spec, Layout(tp))
    for batch, context in ((1, 1), (8, 8192), (32, 1000)):
        floor = decode_floor(spec, find_card("h100"), Layout(tp), batch=batch, context=context)
        parts = step.parts([(1, context)] * batch)
        assert parts["matrices"] + parts["attention"] == pytest.approx(floor, rel=1e-3)
        assert (parts["tensor axis"] > 0) == (tp > 1)
        assert step([(1, context)] * batch) == pytest.approx(sum(parts.values()))


def test_a_prompt_takes_its_arithmetic():
    """`prefill_floor` counts embedding and head for every token, a step the head for each request's last."""
    step, card = step_of(SEVENTY, Layout(8)), find_card("h100")
    parts = step.parts([(8192, 8192)])
    floor = prefill_floor(SEVENTY, card, Layout(8), tokens=8192)
    ends = sum(SEVENTY.parameters[group] for group in ("embedding", "head", "norms"))
    bits = (2 * 8192 * ends - 2 * SEVENTY.parameters["head"]) / (8 * card.flop_rate("bf16"))
    assert parts["matrices"] + parts["attention"] == pytest.approx(floor - bits, rel=1e-3)
    assert parts["attention"] == pytest.approx(attention_flops(SEVENTY, 8192) / (8 * card.flop_rate("bf16")), rel=1e-3)
    assert floor * 8 * card.flop_rate("bf16") == pytest.approx(1.244e15, rel=1e-3)


def test_pieces_of_a_prompt_see_what_was_cached_and_add_up():
    step = step_of(EIGHT)
    whole = step.parts([(4096, 4096)])
    pieces = [step.parts([(1024, end)]) for end in (1024, 2048, 3072, 4096)]
    assert sum(each["attention"] for each in pieces) == pytest.approx(whole["attention"])
    assert sum(each["matrices"] for each in pieces) > whole["matrices"]


def test_where_arithmetic_takes_over_from_memory():
    """The ridge: about 295 tokens a step on an H100 in bf16, 153 on an A100; below, a token more costs nothing."""
    for card, ridge in (("h100", 295), ("a100", 153)):
        step = step_of(EIGHT, card=card)
        at = [step.parts([(n, n)])["matrices"] for n in (1, round(0.95 * ridge), round(1.2 * ridge), 2 * ridge)]
        assert at[0] == at[1] < at[2]
        assert at[3] == pytest.approx(at[0] * 2, rel=0.1)


def test_a_decode_rides_along_with_a_prompt():
    """The weights are read once for both: together less than one after the other."""
    step = step_of(EIGHT)
    prompt, decodes = [(256, 256)], [(1, 1000)] * 16
    assert step(prompt + decodes) < 0.7 * (step(prompt) + step(decodes))


def test_sums_one_by_one():
    """160 for 80 layers, and one for the embedding; at batch 1 they are 16 KiB each, of a prompt of 8,192 128 MiB."""
    step = step_of(SEVENTY, Layout(8))
    for tokens, size in ((1, 16 * 1024), (8192, 128 * MIB)):
        calls = traffic(SEVENTY, Layout(8), 1, tokens, "bf16", backward=False, head="logits")
        sums = calls.where("all_reduce", axis="tp")
        assert {each.payload for each in sums} == {size} and calls.count("all_reduce") == 160 + 1
        bill = step.bill([(tokens, tokens)])
        assert bill.calls == 160 + 2
        link = find_link("nvlink4")
        gather = SEVENTY.vocab // 8 * 2
        exact = 161 * collective_seconds("all_reduce", "ring", size, 8, link) + collective_seconds(
            "all_gather", "ring", gather, 8, link)
        assert step.parts([(tokens, tokens)])["tensor axis"] == pytest.approx(exact)


@pytest.mark.parametrize(("card", "sync", "lowest", "highest"), [("a100", 26e-6, 4.1, 4.3), ("h100", 29e-6, 4.6, 4.75)])
def test_measured_sums_are_half_of_the_weights_time_and_more(card, sync, lowest, highest):
    """160 of 26 to 29 µs are 4.2 to 4.6 ms (Vidur's medians of NCCL), beside 8.65 and 5.26 ms of weights."""
    parts = step_of(SEVENTY, Layout(8), card, sync=sync).parts([(1, 1)])
    assert lowest < 1000 * parts["tensor axis"] < highest
    weights = memory(SEVENTY, Layout(8), "bf16").weights / find_card(card).hbm
    assert 1000 * weights == pytest.approx({"a100": 8.65, "h100": 5.26}[card], rel=2e-3)
    assert 0.48 < parts["tensor axis"] / weights < 0.9


def test_a_prompts_sums_are_as_measured_inside_a_node_and_by_its_ports_between():
    """160 × 128 MiB: 216 ms on 8 A100, 103 ms on 8 H100 (Vidur's 64 MiB all-reduces, twice 160). On 16 A100 they took
    2.3 s, at 17 GB/s for a node: with a port of 50 GB/s for each card it would be a tenth."""
    prompt = [(8192, 8192)]
    one, other = (step_of(SEVENTY, Layout(8), card).parts(prompt)["tensor axis"] for card in ("a100", "h100"))
    assert 0.5 < one / 0.216 < 1 and 0.5 < other / 0.103 < 1
    ported = step_of(SEVENTY, Layout(16), "a100").parts(prompt)["tensor axis"]
    assert 1.3 < ported / one < 2
    cluster = ClusterSpec.of("a100", 16, LinkSpec(name="what they had", per_direction=17.5e9 / 8))
    shared = serve_step(SEVENTY, Layout(16), cluster, speeds=FULL).parts(prompt)["tensor axis"]
    assert 1 < shared < 2.3 and shared > step_of(SEVENTY, Layout(8), "a100")(prompt)


def test_cards_beyond_one_node_are_latency_for_a_decode_and_bandwidth_for_a_prompt():
    """For a decode the slower link costs milliseconds, far from the tens that are often said: 160 · 71 µs = 11 ms."""
    decode = step_of(SEVENTY, Layout(16), "a100", sync=71e-6).parts([(1, 8192)])["tensor axis"]
    assert decode == pytest.approx(162 * 71e-6, rel=0.05)


def test_a_pipeline_adds_its_stages_up_and_hands_over():
    whole, half = step_of(SEVENTY, Layout(8)), step_of(SEVENTY, Layout(8, pp=2))
    work = [(1, 8192)] * 16
    parts = half.parts(work)
    link = find_link("ib-ndr")
    assert parts["hand-overs"] == pytest.approx(link.alpha + 16 * SEVENTY.hidden * 2 / link.per_direction)
    assert half(work) - parts["hand-overs"] == pytest.approx(whole(work), rel=1e-3)  # a request is not made faster
    assert half.pace(work) == pytest.approx(half(work) / 2, rel=0.05) and whole.pace(work) == whole(work)
    assert sum(part.layers for part in half.stages) == 80
    four = step_of(SEVENTY, Layout(8, pp=4)).parts(work)
    assert four["hand-overs"] == pytest.approx(3 * parts["hand-overs"])


def test_a_latent_is_read_as_it_is_or_projected_up_whichever_takes_less():
    step = step_of(V3, Layout(dp=8, ep=8), "h200", dtype="fp8")
    latent, heads = V3.latent, V3.heads
    plain, absorbed = (latent.nope_dim + latent.rope_dim + latent.value_dim, 2 * latent.kv_rank + latent.rope_dim)
    one = step.attention.flop(1, 5000, 5000.0)
    assert one == 2 * heads * absorbed * 5000 < 2 * heads * latent.kv_rank * (latent.nope_dim + latent.value_dim) * 5000
    assert step.attention.flop(5000, 5000, 12.5e6) == 2 * heads * plain * 12.5e6
    assert step.attention.nbytes == kv_per_token(V3) / V3.layers
    cut = step_of(V3, Layout(8), "h200", dtype="fp8")
    assert cut.attention.nbytes == step.attention.nbytes and cut.attention.pair == step.attention.pair / 8


def test_experts_are_read_as_tokens_meet_them_and_sent_to_in_one_go():
    step = step_of(V3, Layout(dp=8, ep=8), "h200", dtype="fp8")
    few, many = (step.parts([(1, 1000)] * n) for n in (1, 64))
    part = step.stages[0]
    met = 1 - (1 - 8 / 256) ** 8  # a token of each of the 8 ranks
    assert few["matrices"] == pytest.approx((part.nbytes + met * part.experts) / find_card("h200").hbm)
    assert many["matrices"] < 5 * few["matrices"]
    row = V3.hidden * 2 * 8 * 7 / 8  # to 8 experts, 7 of 8 on other ranks
    link = find_link("nvlink4")
    assert few["experts' messages"] == pytest.approx(58 * 2 * (link.alpha + row / link.per_direction))


def test_the_published_services_time_a_token_is_near():
    """DeepSeek's decode, 88 streams of 4,989 tokens a card on EP144: 20 to 22 tokens/s each, 47.6 ms."""
    step = serve_step(V3, Layout(dp=144, ep=144), ClusterSpec.of("h800", 144), dtype="fp8", arithmetic="fp8",
                      handed="fp8", redundant=32)
    assert 0.035 < step([(1, 4989)] * 88) < 0.05


def test_windows_see_and_keep_less():
    step, full = step_of(OSS, dtype="int4"), step_of(replace(OSS, window=None, windowed_layers=0), dtype="int4")
    for work in ([(1, 5000)], [(5000, 5000)], [(100, 5000)]):
        assert 0.5 < step.parts(work)["attention"] / full.parts(work)["attention"] < 0.53
    for work in ([(1, 100)], [(128, 128)]):
        assert step.parts(work)["attention"] == pytest.approx(full.parts(work)["attention"])
    card = find_card("h100")
    assert step.parts([(5000, 5000)])["attention"] == pytest.approx(
        attention_flops(OSS, 5000) / card.flop_rate("bf16"), rel=1e-3)
    half, window = OSS.windowed_layers / OSS.layers, OSS.window
    for new, context in ((100, 150), (1, 128), (1, 129), (300, 300), (50, 5000)):
        [(times, *_, pairs, read)] = seen([(new, context)] * 3, OSS)
        positions = range(context - new + 1, context + 1)
        exact = sum((1 - half) * at + half * min(at, window) for at in positions)
        assert (times, pairs) == (3, pytest.approx(exact))
        assert read == (1 - half) * context + half * min(context, window)


def test_each_request_has_its_last_tokens_logits_and_copies_of_experts_none():
    assert step_of(EIGHT).stages[0].head == 2 * EIGHT.vocab * EIGHT.hidden
    tied = step_of(find_model("qwen2.5-0.5b")).stages[0]
    assert tied.head == 2 * 151_936 * 896
    plain, copied = (step_of(V3, Layout(dp=8, ep=8), "h200", dtype="fp8", redundant=n).stages[0] for n in (0, 8))
    assert copied.flop == pytest.approx(plain.flop) and copied.experts > plain.experts


def test_splitwises_steps_were_five_times_their_floors_and_have_their_shape():
    """Llama-2-70b on TP8, 2023 (perf_model.csv): tokens at 5 to 6 times the time their weights take, a batch of 64 at
    1.6 to 1.7 times one; prompts at 31% and 18% of the peak."""
    spec = find_model("llama-2-70b")
    for card, token, sixty_four, prompt, used in (("a100", 44.9, 71.6, 1550, 0.31), ("h100", 29.8, 50.2, 845, 0.18)):
        step = step_of(spec, Layout(8), card)
        weights = memory(spec, Layout(8), "bf16").weights / find_card(card).hbm
        assert 5 < token / 1000 / weights < 6
        assert 1 < step([(1, 512)] * 64) / step([(1, 512)]) < sixty_four / token < 1.7
        floor = prefill_floor(spec, find_card(card), Layout(8), tokens=8192)
        assert floor / (prompt / 1000) == pytest.approx(used, abs=0.02)
        assert step([(8192, 8192)]) < prompt / 1000


def test_shares_and_overhead_are_the_readers():
    work = [(8192, 8192)]
    whole, half = (step_of(EIGHT, speeds=Speeds(share=share, memory=1, links=1)) for share in (1, 0.5))
    assert half(work) == pytest.approx(2 * whole(work))
    dear = step_of(EIGHT, speeds=replace(FULL, overhead=1e-4))
    assert dear([(1, 1)]) - whole([(1, 1)]) == pytest.approx(32e-4)
    slow = step_of(SEVENTY, Layout(8), speeds=replace(FULL, links=0.5)).parts(work)["tensor axis"]
    assert slow == pytest.approx(2 * step_of(SEVENTY, Layout(8)).parts(work)["tensor axis"], rel=0.05)


def test_a_fit_of_its_own_steps_is_close_and_says_how_close():
    step = step_of(EIGHT, speeds=Speeds())
    steps = [[(1, c)] * b for c in (500, 4000) for b in (1, 16, 64)] + [[(n, n)] for n in (512, 2048, 8192)]
    found = fit_steps((work, step(work)) for work in steps)
    assert found.error < 0.25 and found([(1, 2000)] * 32) == pytest.approx(step([(1, 2000)] * 32), rel=0.25)


def test_a_bill_shows_its_parts_and_is_plain_data():
    bill = step_of(SEVENTY, Layout(8)).bill([(1, 8192)] * 4)
    text, data = str(bill), bill.to_dict()
    assert "162 collectives" in text and "a step of 4 requests and 4 new tokens" in text and "assumed" in text
    assert sum(data["parts"].values()) == pytest.approx(data["seconds"]) == bill.seconds
    assert data["work"] == [[1, 8192]] * 4 and data["calls"] == 162
    assert step_of(EIGHT)([]) == 0


@pytest.mark.parametrize(("spec", "layout", "how", "said"), [
    (EIGHT, Layout(16), {"cards": 8}, "tp = 16 takes 16 cards, and 8 × h100 has 8"),
    (EIGHT, Layout(3), {"cards": 3}, "tp = 3 does not cut the 32 heads"),
    (EIGHT, Layout(cp=2), {}, "leave cp out"), (find_model("deepseek-v4-pro"), Layout(), {}, "compressed attention"),
    (OSS, Layout(4, pp=2), {}, "windows in a pipeline"), (EIGHT, Layout(), {"sync": 0}, "sync must be a number"),
    (EIGHT, Layout(), {"arithmetic": "fp4"}, "h100 has no arithmetic in 'fp4'"),
    (V3, Layout(dp=16, ep=16), {"redundant": 3}, "ep = 16 does not share out")])
def test_what_is_refused(spec, layout, how, said):
    with pytest.raises(ValueError, match=said):
        step_of(spec, layout, **how)


@pytest.mark.parametrize("work", [(1, -1), (100, 10), (0, 5), (math.nan, 10)])
def test_what_is_no_work_is_refused(work):
    with pytest.raises(ValueError, match="is no work: one new token or more"):
        serve_step(EIGHT, None, alone(find_card("h100")))([(1, 5), work])
    with pytest.raises(ValueError, match="is no work"):
        fit_steps([([(1, 5)], 1.0), ([(1, 5), work], 2.0)])
