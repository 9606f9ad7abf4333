"""The time of a training step: in its limits, against the bills of what is sent, and what may not make it slower."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.cost import Speeds, attention_flops, forward_flops, step_time, traffic
from shardlab.specs import CardSpec, ClusterSpec, Layout, LinkSpec, ModelSpec, find_model

MODEL = ModelSpec(hidden=64, layers=16, heads=8, kv_heads=4, head_dim=8, ffn=192, vocab=96)
MIXTURE = find_model("deepseek-v3")
IDEAL = Speeds(share=1, memory=1, links=1, overlap=0, measured=("card", "cluster"))
NEVER = 1e30  # so fast that it takes no time


def cluster(cards, per=None, rate=1e12, hbm=NEVER, inside=NEVER, between=NEVER, alpha=None):
    """Cards of `rate` FLOP/s in domains of `per`; what is left out takes no time."""
    fast, slow = (LinkSpec(name=name, per_direction=beta, alpha=alpha)
                  for name, beta in (("fast", inside), ("slow", between)))
    card = CardSpec(name="card", printed=80 * 10**9, hbm=hbm, flops={"fp32": rate, "bf16": rate, "fp8": 2 * rate})
    return ClusterSpec(name="cards", card=card, per_domain=per or cards, domains=cards // (per or cards), inside=fast,
                       between=slow)


def timed(layout, where=None, spec=MODEL, batch=2, seq=32, speeds=IDEAL, **how):
    return step_time(spec, layout, where or cluster(layout.world_size), batch=batch, seq=seq, dtype="fp32",
                     speeds=speeds, **how)


def matrices(spec, tokens):
    """FLOP of all products of a forward pass; to look a row up is none."""
    looked_up = spec.parameters["embedding"] + spec.parameters["norms"]
    return 2 * (spec.active - looked_up) * tokens


def test_one_card_is_its_roofline():
    """Products three times, forward and both halves of backward; attention once and two and a half times."""
    bill = timed(Layout())
    arithmetic = 3 * matrices(MODEL, 64) + 3.5 * 2 * attention_flops(MODEL, 32)
    assert bill.seconds == pytest.approx(arithmetic / 1e12, rel=1e-9)
    assert bill.utilisation == pytest.approx(3 * forward_flops(MODEL, 32, 2) / arithmetic)
    assert timed(Layout(microbatches=5)).seconds == pytest.approx(5 * bill.seconds)
    half = replace(IDEAL, share=0.5)
    assert timed(Layout(), speeds=half).seconds == pytest.approx(2 * bill.seconds)


def test_where_memory_is_slow_bytes_set_the_time():
    """Twice the memory's rate, half the time; and all matrices are read in each of three passes at least, which is most
    of what a few tokens take."""
    slow, fast = (timed(Layout(), cluster(1, rate=NEVER, hbm=hbm), batch=1, seq=2) for hbm in (1e9, 2e9))
    assert slow.seconds == pytest.approx(2 * fast.seconds)
    read = 3 * 4 * (MODEL.total - MODEL.parameters["embedding"] - MODEL.parameters["norms"])
    assert read / 1e9 < slow.parts["arithmetic"] < 1.2 * read / 1e9
    assert slow.parts["optimizer"] == pytest.approx(28 * MODEL.total / 1e9)


def test_recomputing_in_full_is_a_forward_pass_more():
    plain, full = timed(Layout()), timed(Layout(), recompute="full")
    head = 2 * 96 * 64 * 64  # which is not computed again
    assert full.parts["computed again"] == pytest.approx(
        (matrices(MODEL, 64) - head + 2 * attention_flops(MODEL, 32)) / 1e12)
    assert full.seconds - plain.seconds == pytest.approx(full.parts["computed again"])
    assert full.utilisation < plain.utilisation and full.flop == plain.flop


def test_an_overhead_is_paid_for_each_layer_and_pass():
    late = timed(Layout(microbatches=3), speeds=replace(IDEAL, overhead=1e-3))
    assert late.seconds - timed(Layout(microbatches=3)).seconds == pytest.approx(3 * 3 * 16 * 1e-3)


@pytest.mark.parametrize(("ranks", "microbatches", "chunks", "over_ideal", "over_total"), [
    (4, 8, 1, 3 / 8, 3 / 11), (16, 32, 1, 15 / 32, 15 / 47), (8, 16, 2, 7 / 32, 7 / 39)])
def test_equal_stages_idle_by_the_formula(ranks, microbatches, chunks, over_ideal, over_total):
    """FAULTS 7 and 8: (p − 1) / m chunks of the ideal time, (p − 1) / (m chunks + p − 1) of all of it."""
    equal = replace(MODEL, vocab=1)
    bill = timed(Layout(pp=ranks, microbatches=microbatches, schedule="interleaved" if chunks > 1 else "1f1b",
                        chunks=chunks), spec=equal, seq=64)
    assert bill.bubble_over_total == pytest.approx(over_total, rel=5e-3)
    assert bill.line.bubble_over_ideal == pytest.approx(over_ideal, rel=5e-3)


def test_a_heavy_end_is_an_imbalance():
    heavy = timed(Layout(pp=4, microbatches=8), spec=replace(MODEL, vocab=4096))
    equal = timed(Layout(pp=4, microbatches=8), spec=replace(MODEL, vocab=1))
    assert heavy.parts["imbalance"] > 0.3 * heavy.parts["arithmetic"] > 100 * equal.parts["imbalance"]
    assert heavy.bottleneck == "imbalance"
    moved = timed(Layout(pp=4, microbatches=8), spec=replace(MODEL, vocab=4096),
                  weights=[0] + [1] * 16 + [4096 / 900])
    assert moved.seconds < heavy.seconds


@pytest.mark.parametrize("layout", [
    Layout(4), Layout(4, sp="keep"), Layout(4, sp="again"), Layout(2, dp=2), Layout(dp=4), Layout(dp=4, zero=1),
    Layout(dp=4, zero=2), Layout(dp=4, zero=3), Layout(cp=2), Layout(2, cp=2, dp=2, microbatches=3)],
    ids=lambda layout: layout.degrees)
@pytest.mark.parametrize("recompute", [None, "selective", "full"])
def test_bytes_are_those_of_the_traffic_bill(layout, recompute):
    """FAULTS 4 and 5: of each axis what its calls send in a ring, but for the few bytes of the loss, and of what each
    rank has a part of; ZeRO-2 in one pass no more than an all-reduce."""
    bill = timed(layout, recompute=recompute)
    sent = traffic(MODEL, layout, 2, 32, recompute=recompute, accumulate=layout.microbatches)
    assert sum(bill.sent["data"]) == pytest.approx(sent.wire(axis="dp"), rel=2e-2)
    assert sum(bill.sent["cp"]) == pytest.approx(sent.wire(axis="cp"))
    few = sum(call.count * call.wire for call in sent.where(axis="tp")
              if call.phase == "finish" or call.what.startswith("loss"))
    assert sum(bill.sent["tp"]) == pytest.approx(sent.wire(axis="tp") - few)


def test_parts_add_up_and_each_is_shown():
    bill = timed(Layout(2, dp=2, pp=2, microbatches=4), cluster(8, 2, hbm=1e12, inside=1e9, between=1e8, alpha=1e-6))
    assert sum(bill.parts.values()) == pytest.approx(bill.seconds)
    assert {"tensor axis", "bubble", "data axis", "optimizer"} <= {row.label for row in bill.rows}
    assert bill.tokens == 4 * 2 * 2 * 32 and bill.tokens_per_second == pytest.approx(bill.tokens / bill.seconds)
    plain = json.loads(json.dumps(bill.to_dict()))
    assert plain["seconds"] == bill.seconds and plain["sent"]["tp"]["inside"] == bill.sent["tp"][0] > 0


def test_every_parameter_says_where_it_is_from():
    measured = replace(IDEAL, measured=("card", "share"))
    notes = {row.label: row.note for row in timed(Layout(), speeds=measured).rows}
    assert (notes["card"], notes["share"], notes["link between"], notes["memory"]) == (
        "measured", "measured", "datasheet", "assumed")


def test_an_axis_takes_the_link_that_it_crosses():
    """Four ranks inside a domain; over two domains of two, inside first; four domains, every message between."""
    bill = {per: timed(Layout(4), cluster(4, per, inside=1e9, between=1e8)) for per in (4, 2, 1)}
    sums = 64 * 64 * 4 * (4 * 16 + 2)
    assert bill[4].sent["tp"] == (pytest.approx(1.5 * sums), 0)
    assert bill[2].sent["tp"] == (pytest.approx(sums), pytest.approx(sums / 2))
    assert bill[1].sent["tp"] == (0, pytest.approx(1.5 * sums))
    assert bill[4].seconds < bill[2].seconds < bill[1].seconds
    assert bill[2].parts["tensor axis"] == pytest.approx(sums / 1e9 + sums / 2e8)


def test_which_axis_lies_among_neighbours_decides():
    """The one that sends more belongs inside a domain: with many tokens the tensor axis, with few the data axis."""
    where = cluster(4, 2, inside=1e9, between=1e8)
    times = {}
    for batch in (1, 64):
        near, far = (timed(Layout(2, dp=2, order=order), where, batch=batch) for order in ("pp-dp-tp", "pp-tp-dp"))
        assert near.sent["tp"][1] == 0 and far.sent["tp"][0] == 0
        times[batch] = far.seconds / near.seconds
    assert times[64] > 2 and times[1] < 1


def test_gradients_hide_behind_backward_as_far_as_they_overlap():
    where = cluster(4, 4, rate=3e9, inside=1e8)
    shown = [timed(Layout(dp=4), where, speeds=replace(IDEAL, overlap=overlap)).parts["data axis"]
             for overlap in (0, 0.25, 1)]
    assert shown[0] == pytest.approx(1.5 * 4 * MODEL.total / 1e8)
    assert shown[0] > shown[1] > shown[2] == 0
    each = timed(Layout(dp=4, zero=2, microbatches=3), where).parts["data axis"]
    once = timed(Layout(dp=4, zero=1, microbatches=3), where).parts["data axis"]
    assert each == pytest.approx(2 * once)  # three reduce-scatters and a gather, over one of each


def test_a_pair_hides_what_goes_to_experts():
    """DualPipe's pairs send behind arithmetic; what moves the messages is lent by it."""
    layout = Layout(dp=8, pp=4, ep=8, schedule="dualpipe", chunks=2, microbatches=16)
    where = cluster(32, 4, rate=2e14, inside=1e11, between=2e10)
    shown, hidden, lent = (timed(layout, where, MIXTURE, 1, 4096, replace(IDEAL, paired=paired, lent=part))
                           for paired, part in ((0, 0), (1, 0), (1, 0.2)))
    assert hidden.seconds < lent.seconds < shown.seconds
    parts = [bill.parts["experts' messages"] for bill in (hidden, lent, shown)]
    assert parts == sorted(parts) and parts[0] < 0.5 * parts[2]


def test_experts_are_sent_to_by_what_dispatch_counts():
    """A token goes to four nodes at most, and is handed on to eight experts; there, back, and both again backward."""
    layout = Layout(dp=64, ep=64)
    bill = timed(layout, cluster(64, 8), MIXTURE, 1, 16)
    row, layers = 16 * 7168 * 4, 58
    assert bill.sent["ep"] == (pytest.approx(layers * 4 * row * 8 * 7 / 8), pytest.approx(layers * 4 * row * 4 * 7 / 8))


def test_model_flops_are_of_active_parameters():
    """FAULTS 2: 6 a token for each parameter that it uses, and attention; nothing that is computed again."""
    bill = timed(Layout(dp=64, ep=64), cluster(64, 8), MIXTURE, 1, 16, recompute="full")
    assert bill.flop == pytest.approx(6 * MIXTURE.active * bill.tokens, rel=1e-2)


layouts = st.sampled_from([
    Layout(8), Layout(4, dp=2, sp="keep"), Layout(2, dp=2, pp=2, microbatches=4), Layout(dp=8, zero=3),
    Layout(2, dp=2, cp=2), Layout(pp=4, dp=2, zero=1, microbatches=8, schedule="interleaved", chunks=2),
    Layout(pp=8, microbatches=16, schedule="zero_bubble"), Layout(pp=4, dp=2, schedule="dualpipe_v", chunks=2,
                                                                  microbatches=8)])


@settings(max_examples=40, deadline=None)
@given(layouts, st.sampled_from(["rate", "hbm", "inside", "between", "alpha"]), st.sampled_from([1, 2, 4, 8]),
       st.floats(1.0, 100.0))
def test_nothing_that_gets_faster_makes_a_step_slower(layout, what, per, factor):
    given_ = dict(rate=1e11, hbm=1e10, inside=1e9, between=1e8, alpha=1e-5)
    faster = given_ | {what: given_[what] / factor if what == "alpha" else given_[what] * factor}
    before, after = (timed(layout, cluster(8, per, **these), speeds=replace(IDEAL, overlap=0.5))
                     for these in (given_, faster))
    assert after.seconds <= before.seconds * (1 + 1e-9)


@pytest.mark.parametrize(("wrong", "said"), [
    (dict(layout=Layout(4)), "a layout of 4 ranks, and cards has 8 cards"),
    (dict(layout=Layout(8, dp=1), batch=0), "batch must be a whole number of at least 1"),
    (dict(layout=Layout(dp=8), recompute="some"), "recompute must be"),
    (dict(layout=Layout(dp=8), arithmetic="int4"), "no arithmetic in 'int4'"),
    (dict(layout=Layout(dp=8, ep=8)), "has no experts"),
])
def test_what_is_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        timed(where=cluster(8), **wrong)


@pytest.mark.parametrize("wrong", [dict(share=0), dict(links=1.5), dict(overlap=-0.1), dict(skew=0.5),
                                   dict(overhead=-1), dict(measured=("hbm",))])
def test_speeds_are_parts(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Speeds(**wrong)
