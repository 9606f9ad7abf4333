"""The ladder: which rung is taken, by which number, and that each rung says why."""

import json
from dataclasses import replace

import pytest

from shardlab.cost import Serve, Train, decode_floor, ladder, memory, serve_way, serving, training
from shardlab.specs import CardSpec, Layout, find_card, find_link, find_model
from shardlab.specs.units import decimal, seconds

H100, A100 = find_card("h100"), find_card("a100")
EIGHT, SEVENTY, V3 = (find_model(name) for name in ("llama-3.1-8b", "llama-3.1-70b", "deepseek-v3"))


def rungs(plan):
    return [(step.name, step.does) for step in plan.steps]


def test_one_card_is_enough_is_an_answer():
    plan = ladder(EIGHT, H100, Serve(concurrency=16), cards=8)
    assert rungs(plan) == [("one card, bf16", "yes")]
    assert plan.answer.startswith("one card is enough: 34.541 GB of 85.521 GB on each card")
    assert plan.bill.per_rank == serving(EIGHT, context=8192, concurrency=16).per_rank <= H100.memory


def test_fewer_bits_come_first_and_in_what_the_card_computes():
    assert rungs(ladder(SEVENTY, H100, Serve())) == [("one card, bf16", "no"), ("fewer bits, fp8", "yes")]
    assert rungs(ladder(SEVENTY, A100, Serve()))[1] == ("fewer bits, int8", "yes")
    on_a100 = ladder(SEVENTY, A100, Serve()).chosen
    assert "prefill still computes in bf16" in on_a100.why
    assert on_a100.bill.weights == memory(SEVENTY, dtype="int8").weights


BUSY = Serve(concurrency=32, rate=1500)


def test_copies_share_out_the_requests_before_anything_is_cut():
    """Copies send nothing to each other: 8 of fp8 weights hold 4 requests each, where one card holds 4 and not 32."""
    plan = ladder(SEVENTY, H100, Serve(concurrency=32), cards=8)
    assert rungs(plan) == [("one card, bf16", "no"), ("fewer bits, fp8", "yes")]
    assert plan.answer.startswith("fewer bits, fp8: 8 copies, with 4 requests each: 84.937 GB of 85.521 GB")
    assert (plan.chosen.cards, plan.bill.layout) == (8, Layout(1))
    assert plan.bill.per_rank == serving(SEVENTY, context=8192, concurrency=4, dtype="fp8").per_rank
    eight = ladder(EIGHT, H100, Serve(concurrency=100), cards=8)
    assert eight.chosen.cards == 2 and eight.answer.startswith("one card, bf16: 2 copies, with 50 requests each")
    assert ladder(EIGHT, H100, Serve(concurrency=100)).steps[0].does == "no"


def test_more_copies_are_taken_where_a_token_would_take_too_long_with_few():
    two = ladder(EIGHT, H100, Serve(concurrency=100), cards=8).chosen
    floor = decode_floor(EIGHT, H100, batch=50, context=8192)
    assert seconds(floor) in two.why
    quicker = ladder(EIGHT, H100, Serve(concurrency=100, latency=0.99 * floor), cards=8).chosen
    assert quicker.why.startswith("8 copies, with 13 requests each")


def test_four_bits_are_named_and_not_chosen_over_cards_that_are_there():
    plan = ladder(SEVENTY, H100, BUSY, cards=8)
    assert rungs(plan) == [
        ("one card, bf16", "no"), ("fewer bits, fp8, fp8 cache", "no"), ("fewer bits, int4", "would"),
        ("offload", "no"), ("a bigger card, b200, fp8, fp8 cache", "would"),
        ("cut, tensor parallel over 4, bf16", "yes")]
    assert plan.chosen.cards == 4 and plan.bill.layout == Layout(4)
    alone = ladder(SEVENTY, H100, Serve(concurrency=32))
    assert alone.chosen.name == "fewer bits, int4, fp8 cache"


def test_the_smallest_cut_that_does_is_taken_and_no_smaller_one_would():
    """All cards together must make more tokens than so many copies would: each of them reads the weights for itself."""
    plan = ladder(SEVENTY, H100, BUSY, cards=8)
    four_of_two = 32 / decode_floor(SEVENTY, H100, Layout(2), batch=8, context=8192)
    one_of_four = 32 / decode_floor(SEVENTY, H100, Layout(4), batch=32, context=8192)
    assert four_of_two < 1500 < one_of_four
    assert plan.answer.endswith(f"up to {one_of_four:,.0f} tokens/s, of which 1,500 are asked for")
    assert plan.chosen.nbytes == serving(SEVENTY, Layout(4), context=8192, concurrency=32).per_rank


def test_the_binding_term_is_named():
    """SV2: raising the utilisation is one lever of four; SV3: none fits is "does not fit", never 0.00 requests."""
    steps = ladder(SEVENTY, H100, Serve(concurrency=200)).steps
    assert steps[0].why == "does not fit: 141.11 GB of weights alone in 85.521 GB: the weights bind"
    assert steps[1].why.startswith("8 of 200 requests fit beside") and steps[1].why.endswith("the cache binds")
    none = ladder(replace(V3, layers=122), find_card("h800"), Serve(), cards=8)
    short = ladder(V3, find_card("h800"), Serve(), cards=8).steps[-3]
    assert short.why == "does not fit: 86.752 GB of weights and work is more than 85.521 GB, before any request"
    assert none.chosen is None and none.bill is None
    assert none.answer.startswith("8 × h800 will not do: 1376.5 GB of weights and caches ask for about 17 cards")
    assert not any(" 0 of" in step.why or "0.00" in step.why for step in none.steps)


def test_a_cut_may_need_a_smaller_cache_too():
    plan = ladder(SEVENTY, H100, Serve(concurrency=200), cards=8)
    assert rungs(plan)[-2:] == [("cut, tensor parallel over 8, bf16", "no"),
                                ("cut, tensor parallel over 4, bf16, fp8 cache", "yes")]


def test_a_latency_that_one_card_cannot_reach_is_a_reason_to_cut():
    floor = decode_floor(EIGHT, A100, context=8192)
    assert ladder(EIGHT, A100, Serve(latency=1.01 * floor)).chosen.name == "one card, bf16"
    plan = ladder(EIGHT, A100, Serve(latency=floor / 4), cards=8)
    assert plan.steps[0].why == "fits, but a token takes 7.89 ms at least, and may take 1.97 ms"
    assert "offload" not in [step.name for step in plan.steps]  # it fits: streaming would only slow it down
    assert plan.chosen.name == "cut, tensor parallel over 8, bf16"
    faster = ladder(EIGHT, A100, Serve(latency=floor / 8.5), cards=8)
    assert rungs(faster)[-3:] == [("cut, tensor parallel over 8, bf16", "no"),
                                  ("cut, tensor parallel over 8, bf16, fp8 cache", "no"),
                                  ("cut, tensor parallel over 8, int8, fp8 cache", "yes")]


def test_little_traffic_is_a_reason_not_to_cut_and_much_is_one_to_cut():
    quiet = ladder(EIGHT, H100, Serve(concurrency=16, rate=50), cards=8)
    most = 16 / decode_floor(EIGHT, H100, batch=16, context=8192)
    assert quiet.answer.startswith("one card is enough")
    assert quiet.answer.endswith(f"up to {most:,.0f} tokens/s, of which 50 are asked for")
    busy = ladder(EIGHT, H100, Serve(concurrency=16, rate=1.5 * most), cards=8)
    assert busy.chosen.why.startswith("8 copies, with 2 requests each") and busy.chosen.cards == 8
    too_much = ladder(EIGHT, H100, Serve(rate=10**6), cards=8).steps[0]
    assert too_much.does == "no" and too_much.why == (
        "fits, but with 1 request at once it makes 208 tokens/s at most, of the 1,000,000 asked for")


def test_a_bigger_card_is_the_smallest_that_does_it_alone():
    plan = ladder(SEVENTY, H100, Serve(context=32768, concurrency=4, latency=1))
    bigger = next(step for step in plan.steps if step.name.startswith("a bigger card"))
    assert bigger.name == "a bigger card, b200" and "no collective" in bigger.why
    need = serving(SEVENTY, context=32768, concurrency=4).per_rank
    assert find_card("h200").memory < need <= find_card("b200").memory


def test_a_card_that_is_announced_only_is_not_offered():
    plan = ladder(SEVENTY, H100, Serve(concurrency=32))
    assert [step.name for step in plan.steps if "bigger" in step.name] == ["a bigger card, b300"]
    assert find_card("rubin").usable is None and H100.memory < find_card("rubin").memory < find_card("b300").memory


def test_offload_streams_what_has_no_room_over_the_hosts_link():
    big, link = find_model("llama-3.1-405b"), find_link("pcie5")
    whole = serving(big, context=8192)
    excess = whole.per_rank + 2 * whole.weights // 126 - H100.memory
    plan = ladder(big, H100, Serve(latency=60))
    assert plan.chosen.name == "offload"
    assert plan.chosen.why == (f"{decimal(excess)} stay with the host; over pcie5, {decimal(link.per_direction)}/s, "
                               f"a token waits {seconds(excess / link.per_direction)}")
    assert rungs(ladder(big, H100, Serve(latency=10)))[3] == ("offload", "no")
    unknown = ladder(big, replace(H100, host_link=None), Serve(latency=60)).steps[3]
    assert (unknown.does, unknown.why) == ("no", "its link to the host isn't known")


def test_a_batch_streams_every_expert_that_one_of_its_tokens_is_sent_to():
    """One token needs 8 of 256 experts a layer, 32 tokens most of them: offload is then ten times as slow."""
    one, many = (ladder(V3, H100, Serve(latency=latency, concurrency=n, context=1024)).chosen
                 for n, latency in ((1, 0.6), (32, 7)))
    assert (one.name, many.name) == ("offload", "offload")
    assert rungs(ladder(V3, H100, Serve(latency=5, concurrency=32, context=1024)))[2] == ("offload", "no")


def test_offload_is_no_faster_than_the_card_reads():
    slow = replace(H100, usable=38 * 10**9, hbm=2e10)  # all but a little fits, and reading it takes 1.8 s
    steps = ladder(SEVENTY, slow, Serve(latency=1.2, context=64, dtype="int4")).steps
    assert (steps[1].name, steps[1].does) == ("offload", "no")
    assert ladder(SEVENTY, slow, Serve(latency=2, context=64, dtype="int4")).steps[1].does == "yes"


def test_a_mixture_is_told_its_first_axis():
    plan = ladder(V3, find_card("h200"), Serve(concurrency=8), cards=8)
    assert plan.chosen.name == "cut, tensor parallel over 8, fp8"
    assert "the experts, 97% of the weights, are the first axis" in plan.answer
    spread = ladder(V3, find_card("h800"), Serve(concurrency=8), cards=16)
    assert spread.chosen.name == "cut further" and spread.chosen.does == "would"


def test_training_recomputes_then_offloads_then_shares_out_its_states():
    assert rungs(ladder(find_model("qwen2.5-1.5b"), H100, Train())) == [("one card", "yes")]
    alone = ladder(EIGHT, H100, Train())
    assert rungs(alone) == [("one card", "no"), ("recompute in full", "no"), ("offload the optimizer", "would"),
                            ("a bigger card, h200", "would"), ("cut further", "no")]
    assert alone.chosen.name == "offload the optimizer"
    eight = ladder(EIGHT, H100, Train(), cards=8)
    assert eight.chosen.name == "cut, ZeRO-1 over 8" and "recomputing" not in eight.chosen.why
    assert eight.bill.layout == Layout(dp=8, zero=1)
    assert eight.chosen.nbytes == eight.bill.per_rank == training(EIGHT, eight.bill.layout, batch=1, seq=4096).per_rank
    four = ladder(EIGHT, H100, Train(), cards=4).chosen
    assert four.name == "cut, ZeRO-2 over 4" and "recomputing" not in four.why
    two = ladder(EIGHT, H100, Train(), cards=2).chosen
    assert two.name == "cut, ZeRO-3 over 2" and "recomputing in full" in two.why
    many = ladder(SEVENTY, H100, Train(), cards=64)
    assert many.chosen.name == "cut, ZeRO-3 over 64" and many.bill.layout == Layout(dp=64, zero=3)
    few = ladder(SEVENTY, H100, Train(), cards=8)
    assert few.chosen.name == "cut and offload, ZeRO-3 over 8" and few.chosen.does == "would"
    bill = training(SEVENTY, Layout(dp=8, zero=3), batch=1, seq=4096, recompute="full")
    assert few.chosen.nbytes == bill.per_rank - bill.states and bill.part("under way") > 0
    assert ladder(SEVENTY, H100, Train(), cards=2).answer.endswith(
        "1128.9 GB of weights, gradients and states ask for about 16 cards")


@pytest.mark.parametrize(("name", "cards"), [("llama-3.1-8b", 2), ("llama-3.1-8b", 4), ("llama-3.1-8b", 8),
                                             ("llama-3.1-70b", 64), ("llama-3.1-405b", 128)])
def test_the_first_stage_that_fits_is_taken(name, cards):
    """What is skipped by its lower bound would not have fitted by its bill either."""
    spec = find_model(name)
    chosen = ladder(spec, H100, Train(), cards=cards).bill
    tried = [(tp, recompute, zero) for tp in (1, 2, 4, 8) for recompute in (None, "full") for zero in (1, 2, 3)]
    for tp, recompute, zero in tried:
        bill = training(spec, Layout(tp, dp=cards // tp, zero=zero), batch=1, seq=4096, recompute=recompute)
        if bill.per_rank <= H100.memory:
            assert bill.to_dict() == chosen.to_dict()
            return
        assert bill.layout != chosen.layout or recompute is None
    raise AssertionError("none fits")


def test_an_offloaded_optimizer_is_weighed_against_the_arithmetic_that_is_done():
    """Twice the layers, where they are computed again: a third more arithmetic to hide the transfers behind."""
    plain = ladder(EIGHT, H100, Train(batch=1)).chosen
    assert "61.598 GB stay on the card;" in plain.why and "the arithmetic 200 ms or more" in plain.why
    again = next(s for s in ladder(EIGHT, H100, Train(batch=2)).steps if "offload" in s.name)
    assert "recomputing in full" in again.why and "the arithmetic 532 ms or more" in again.why and again.does == "yes"


def test_long_sequences_bind_by_activations_and_are_recomputed():
    plan = ladder(find_model("qwen2.5-0.5b"), H100, Train(batch=8, seq=4096))
    assert rungs(plan) == [("one card", "no"), ("recompute in full", "yes")]
    assert "of activations and buffers beside" in plan.steps[0].why


def test_plain_data_holds_inputs_counts_bill_and_steps():
    for plan in (ladder(V3, find_card("h200"), Serve(concurrency=8), cards=8), ladder(EIGHT, H100, Train())):
        data = plan.to_dict()
        assert json.loads(json.dumps(data)) == data
        assert data["parameters"] == {"resident": plan.spec.total, "active": plan.spec.active}
        assert [step["why"] for step in data["steps"]] == [step.why for step in plan.steps]
    assert ladder(EIGHT, H100, Serve()).to_dict()["bill"]["per_rank"] == serving(EIGHT, context=8192).per_rank
    assert str(plan).splitlines()[-1] == "Answer: offload the optimizer." and "<th" in plan._repr_html_()


LAB = CardSpec(name="lab card", printed=256 * 2**20, hbm=1e10, flops={"fp32": 1e11})


def test_the_card_of_the_lab_takes_the_lab_model_in_fewer_bits():
    small = find_model("smollm2-135m")
    plan = ladder(small, LAB, Serve(context=256, dtype="fp32", kv_dtype="fp32", reserve="0 B", latency=10))
    assert rungs(plan) == [("one card, fp32", "no"), ("fewer bits, int8", "yes")]


@pytest.mark.parametrize(("call", "message"), [
    (lambda: ladder(EIGHT, H100, Serve(), cards=0), "cards must be a whole number of at least 1, not 0"),
    (lambda: ladder(EIGHT, H100, Serve(concurrency=0)), "concurrency must be a whole number"),
    (lambda: ladder(EIGHT, H100, Serve(context=-5)), "context must be a whole number of at least 1, not -5"),
    (lambda: Serve(concurrency=True), "concurrency must be a whole number"),
    (lambda: Serve(latency=0), "latency must be a number above 0"),
    (lambda: Serve(rate=-1), "rate must be a number above 0"),
    (lambda: ladder(EIGHT, H100, Serve(dtype="fp7")), "unknown dtype 'fp7'"),
    (lambda: ladder(EIGHT, H100, Serve(reserve="much")), "'much' is no size"),
    (lambda: ladder(EIGHT, H100, Train(reserve=10**9)), "1000000000 is no size: write a number and one of"),
    (lambda: Train(seq=0), "seq must be a whole number"),
    (lambda: memory(EIGHT, training="yes"), "training must be true or false"),
    (lambda: memory(EIGHT, optimizer=["adamw"]), "unknown optimizer"),
    (lambda: memory(EIGHT, training=True, master=0), "unknown dtype 0"),
    (lambda: ladder(EIGHT, H100, Train(batch=0)), "batch must be"),
    (lambda: ladder(EIGHT, H100, Train(dtype="int8")), "weights stored as int8 are served, not trained"),
    (lambda: ladder(EIGHT, H100, Train(optimizer="adam")), "unknown optimizer 'adam'"),
    (lambda: serving(EIGHT, context=8, host_kv=2), "host_kv = 2 is a share of the cache"),
])
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_context_that_the_model_was_not_made_for_is_said():
    long = ladder(find_model("llama-2-7b"), H100, Serve(context=8192))
    assert long.footnotes[0] == "8,192 tokens are more than the 4,096 that llama-2-7b was made for."
    assert len(ladder(EIGHT, H100, Serve(context=8192)).footnotes) == 1
    assert "16,384 tokens" in ladder(find_model("llama-2-7b"), H100, Train(seq=16384)).footnotes[0]
    with pytest.raises(ValueError, match="gpt2 has learned 1,024 positions, too few for 8,192 tokens"):
        ladder(find_model("gpt2"), H100, Serve(context=8192))
    with pytest.raises(ValueError, match="gpt2 has learned 1,024 positions, too few for 4,096 tokens"):
        ladder(find_model("gpt2"), H100, Train())


def test_more_cards_are_never_worse():
    """Only degrees that divide the cards were tried once: five MI300X then did worse than four."""
    big = find_model("llama-3.1-405b")
    task = Serve(context=1024, concurrency=32, latency=0.05)
    four, five = (ladder(big, find_card("mi300x"), task, cards) for cards in (4, 5))
    assert four.chosen.does == five.chosen.does == "yes" and four.chosen.name == five.chosen.name


def test_a_cache_in_fp8_is_tried_before_weights_are_touched():
    plan = ladder(find_model("gpt-oss-120b"), H100, Serve(context=32768, concurrency=30))
    assert rungs(plan) == [("one card, mxfp4", "no"), ("fewer bits, mxfp4, fp8 cache", "yes")]


def test_what_fits_and_is_too_slow_is_not_told_to_be_cut_for_room():
    plan = ladder(EIGHT, H100, Serve(latency=0.0005))
    assert plan.chosen is None and plan.answer.startswith("1 × h100 will not do: it fits, and is too slow")


def test_activations_that_bind_are_met_with_a_smaller_batch():
    plan = ladder(find_model("qwen2.5-0.5b"), H100, Train(batch=64, seq=4096))
    assert plan.steps[-1].why.endswith("a smaller batch, its gradients summed over several passes, or a shorter "
                                       "sequence")


def test_four_bits_may_be_cut_where_whole_ones_do_not_fit():
    plan = ladder(find_model("llama-3.1-405b"), H100, Serve(), cards=4)
    assert plan.chosen.name == "cut, tensor parallel over 4, int4, fp8 cache" and plan.chosen.does == "would"


def test_a_bigger_card_may_need_fewer_bits_too():
    plan = ladder(find_model("qwen3-235b-a22b"), H100, Serve())
    assert plan.chosen.name == "a bigger card, b300, fp8, fp8 cache"


def test_thousands_of_copies_are_searched_by_halving(monkeypatch):
    """One by one, 20,000 copies took 20,000 bills and more a rung."""
    bills = []
    monkeypatch.setattr(serve_way, "serving", lambda *args, **kwargs: bills.append(1) or serving(*args, **kwargs))
    ladder(find_model("llama-3.1-405b"), H100, Serve(concurrency=20_000), cards=20_000)
    assert 0 < len(bills) < 2000


@pytest.mark.parametrize("call", [lambda: ladder("llama-3.1-8b", H100, Serve()), lambda: ladder(EIGHT, "h100", Serve()),
                                  lambda: serving("llama-3.1-8b", context=8), lambda: training("x", batch=1, seq=8)])
def test_names_are_not_specs(call):
    with pytest.raises(TypeError, match="find_"):
        call()
