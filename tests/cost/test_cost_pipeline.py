"""The account of a pipeline by hand, on published cases, and what it refuses."""

import json

import pytest

from shardlab import schedule
from shardlab.cost.activations import activations
from shardlab.cost.memory import memory
from shardlab.cost.pipeline import pipeline, weight_versions
from shardlab.cost.traffic import traffic
from shardlab.specs import Layout, ModelSpec, find_model

SIZES = dict(hidden=4, layers=3, heads=2, kv_heads=1, head_dim=2, ffn=6, vocab=10)
SPEC, TIED = ModelSpec(**SIZES), ModelSpec(**SIZES, tied=True)
SIZE = dict(batch=2, seq=3)
LAYER, TABLE = 16 + 8 + 8 + 16 + 3 * 24 + 2 * 4, 10 * 4
TOKEN = 2 * 3 * 4  # fp32: bytes of a number of all tokens


def test_a_pipeline_by_hand():
    """1F1B on two ranks: layers 0 and 1, then 2; two micro-batches at a time on the first, one on the last."""
    bill = pipeline(SPEC, schedule.one_f_one_b(2, 3), **SIZE)
    first, last = bill.ranks
    layer = TOKEN * (2 * (3 * 4 + 1) + 4 + 2 + 2 + 4 + 2 + 4 * 6)
    turned = 3 * 2 * 2 * 4
    assert (first.parameters, last.parameters) == (2 * LAYER + TABLE, LAYER + 4 + TABLE)
    assert (first.weights, first.gradients) == (4 * first.parameters, 4 * first.parameters)
    assert first.states == 8 * first.parameters + 4 * (1 + 2 * 9) and last.states == 8 * last.parameters + 4 * (9 + 2)
    kept = [2 * layer + turned + 6 * 8, layer + turned + TOKEN * (3 * 4 + 1 + 10) + 6 * 8 + 4 + 4]
    assert [each.stages[0].kept for each in bill.ranks] == kept
    assert (first.live, first.activations, first.late) == ({0: 2}, 2 * kept[0], {})
    assert (last.live, last.activations) == ({1: 1}, kept[1])
    assert first.peak == first.activations  # its last layer's gradients are not counted
    assert last.peak == kept[1] + TOKEN * 2 * 10 - 6 * 8 - 4  # log-softmax and two more, and the labels let go
    assert (bill.hop, first.forward, first.backward, last.forward, last.backward) == (96, 288, 0, 0, 288)
    assert first.held == first.weights + first.gradients + first.states + first.peak and bill.largest is first
    assert [(c.op, c.phase, c.count, c.payload) for c in bill.traffic(0, start=True, clip=True).collectives] == [
        ("all_gather", "start", 1, 8), ("send", "forward", 3, 96), ("recv", "backward", 3, 96),
        ("broadcast", "forward", 1, 8), ("all_reduce", "clip", 1, 8)]
    assert bill.traffic(0).wire() == 288 + 4 and bill.traffic(1).hops() == 3 + 1


def test_weight_gradients_put_off_by_hand():
    """ZB-H1's last of two ranks has one micro-batch's to compute while the next one's forward pass is kept."""
    last = pipeline(SPEC, schedule.zero_bubble(2, 3), **SIZE)[1]
    inputs, gradients = 4 + 4 + 4 + 6, (4 + 2 + 2) + 4 + 2 * 6 + 4
    assert last.stages[0].put_off == TOKEN * (inputs + gradients + 4 + 10)
    assert (last.live, last.late) == ({1: 1}, {1: 1})
    assert last.activations == last.stages[0].kept + last.stages[0].put_off


def test_a_tied_embedding_is_on_both_ends_and_its_gradient_summed():
    bill = pipeline(TIED, schedule.gpipe(3, 2), **SIZE)
    assert [each.parameters for each in bill.ranks] == [LAYER + TABLE, LAYER, LAYER + 4 + TABLE]
    for rank, times in enumerate((1, 0, 1)):
        calls = bill.traffic(rank, start=True)
        assert calls.total("all_reduce", "finish") == calls.total("broadcast", "start") == 4 * TABLE * times
    frozen = pipeline(TIED, schedule.gpipe(3, 2), **SIZE, frozen=("embed_tokens",))
    assert frozen.traffic(2).count("all_reduce", "finish") == 0 and frozen[2].gradients == 4 * (LAYER + 4)
    assert frozen[2].states == 8 * (LAYER + 4) + 4 * (9 + 1)
    folded = pipeline(TIED, schedule.dualpipe_v(2, 4), **SIZE)  # the last stage is on the first rank
    assert sum(each.parameters for each in folded.ranks) == TIED.total
    assert folded.traffic(0).count("all_reduce", "finish") == 0


@pytest.mark.parametrize("sp", [False, "keep", "again"])
@pytest.mark.parametrize("recompute", [None, "full"])
def test_the_stages_together_are_the_model(sp, recompute):
    """Parameters, the tensor axis's calls and what is kept, but for what each stage has of its own."""
    spec = ModelSpec(**SIZES | dict(layers=7))
    layout = Layout(2, sp=sp)
    bill = pipeline(spec, schedule.interleaved(2, 2), **SIZE, layout=layout, recompute=recompute, dtype="fp64")
    whole = memory(spec, layout, training=True, dtype="fp64")
    for kind in ("weights", "gradients", "states"):
        assert sum(getattr(each, kind) for each in bill.ranks) == getattr(whole, kind)
    plain = traffic(spec, layout, **SIZE, recompute=recompute, dtype="fp64", accumulate=2)
    for phase in ("forward", "backward", "finish"):
        assert sum(bill.traffic(r).total(phase=phase, axis="tp") for r in (0, 1)) == plain.total(phase=phase)
    assert bill.hop == 4 * 8 * (6 if not sp else 3)
    kept = activations(spec, layout, **SIZE, recompute=recompute, dtype="fp64")
    turned = 3 * 2 * 2 * 8
    assert sum(s.kept for each in bill.ranks for s in each.stages) == kept.total + 3 * turned  # loss: as big as number


def test_gradients_pass_through_a_stage_that_trains_nothing():
    """Those of an input that it has received; the first stage has none, and nothing to do."""
    bill = pipeline(SPEC, schedule.one_f_one_b(2, 2), **SIZE, layout=Layout(2), frozen=("embed_tokens", "layers"))
    assert [bill.traffic(rank).count("all_reduce", "backward") for rank in (0, 1)] == [0, 2 * (1 + 2)]
    assert "as if nothing were frozen" in str(bill) and bill[0].gradients == 0 and bill[1].backward == 2 * 96


def test_a_mixture_has_dense_layers_first():
    spec = find_model("deepseek-v3")
    bill = pipeline(spec, schedule.gpipe(16, 2), batch=1, seq=64, dtype="bf16", device="cuda")
    (_, dense), (_, mixture) = activations(spec, batch=1, seq=64, dtype="bf16", device="cuda").kinds
    dense, mixture = (sum(term.nbytes for term in terms) for terms in (dense, mixture))
    turned = 64 * 2 * spec.latent.rope_dim * 2
    assert bill[0].stages[0].kept == 3 * dense + mixture + turned + 64 * 8 and dense != mixture
    assert bill[1].stages[0].kept == 4 * mixture + turned


def test_a_rank_that_only_infers_holds_weights_and_sends_forward():
    bill = pipeline(SPEC, schedule.forward_only(3, 4), **SIZE)
    for each in bill.ranks:
        assert (each.gradients, each.states, each.activations, each.peak, each.backward) == (0, 0, 0, 0, 0)
        assert {c.phase for c in bill.traffic(each.rank, clip=True).collectives} == {"forward"}
    assert [each.forward for each in bill.ranks] == [4 * 96, 4 * 96, 0]
    assert "gradients" not in str(bill)


def test_interleaving_holds_more_by_the_published_factor():
    """B2-interleaved-mem: 1 + (p − 1) / (p v), of what 1F1B's first rank holds."""
    p, v = 8, 4
    spec = ModelSpec(**SIZES | dict(layers=p * v))
    one, more = (pipeline(spec, orders, **SIZE)[0] for orders in (
        schedule.one_f_one_b(p, 64), schedule.interleaved(p, 64, v)))
    layers = [sum(n * len(each.stage.layers) for each in rank.stages for n in [rank.live.get(each.stage.number, 0)])
              for rank in (one, more)]
    assert layers[0] == spec.layers and layers[1] / layers[0] == 1 + (p - 1) / (p * v) == 1.21875
    assert more.activations / one.activations == pytest.approx(1.21875, rel=0.03)  # each stage turns for itself
    assert sum(each.forward for each in pipeline(spec, schedule.interleaved(p, 64, v), **SIZE).ranks) == 31 * 64 * 96


def test_gpipe_holds_all_micro_batches_and_1f1b_as_many_as_stages_to_come():
    four, all_ = (pipeline(SPEC, orders(3, 9), **SIZE) for orders in (schedule.one_f_one_b, schedule.gpipe))
    assert [sum(each.live.values()) for each in four.ranks] == [3, 2, 1]
    assert [sum(each.live.values()) for each in all_.ranks] == [9, 9, 9]
    assert all_[0].activations == 3 * four[0].activations
    assert [each.weights for each in all_.ranks] == [each.weights for each in four.ranks]


def test_llama_3_70b_over_eight_stages():
    """Ten layers each; 128,256 rows of 8,192 at either end; 16 bytes a parameter in mixed precision."""
    bill = pipeline(find_model("llama-3.1-70b"), schedule.one_f_one_b(8, 16), batch=1, seq=8192, dtype="bf16",
                    master="fp32", recompute="full", device="cuda")
    layer = 2 * 8192 * 8192 + 2 * 1024 * 8192 + 3 * 28672 * 8192 + 2 * 8192
    assert layer == 855_654_400
    ends = [128256 * 8192, 0, 0, 0, 0, 0, 0, 128256 * 8192 + 8192]
    assert [each.parameters for each in bill.ranks] == [10 * layer + end for end in ends]
    assert bill[3].weights + bill[3].gradients + bill[3].states == 16 * 10 * layer + 4 * 90
    assert bill.hop == 8192 * 8192 * 2 == 134_217_728
    block = bill.hop  # all that a block keeps when it is computed again
    assert [each.activations // block for each in bill.ranks] == [80, 70, 60, 50, 40, 30, 20, 10 + 2 + 31]
    assert 31 <= 8192 * 128256 * 4 / block < 32  # log-softmax in fp32; the last norm's input and output
    assert bill[4].stages[0].kept == 10 * block + 8192 * 2 * 128 * 2
    assert "no run of ours" in str(bill) and "rank 7: states" in str(bill)


def test_pipedream_keeps_as_many_versions_as_stages_to_come():
    assert [weight_versions(4, rank) for rank in range(4)] == [4, 3, 2, 1]
    bill = pipeline(SPEC, schedule.one_f_one_b(3, 4), **SIZE)
    stashed = [bill.stashed(rank) for rank in range(3)]
    assert stashed == [3 * 4 * (LAYER + TABLE), 2 * 4 * LAYER, 4 * (LAYER + 4 + TABLE)]


def test_dualpipe_holds_two_models_and_sums_their_gradients():
    """The table of DualPipe: parameters 2 ×, activations PP + 1."""
    spec = ModelSpec(**SIZES | dict(layers=8))
    bill = pipeline(spec, schedule.dualpipe(8, 20), **SIZE)
    assert sum(each.parameters for each in bill.ranks) == 2 * spec.total
    assert {sum(each.live.values()) + sum(each.late.values()) for each in bill.ranks} <= {8, 9}
    for each in bill.ranks:
        finish, = bill.traffic(each.rank).where("all_reduce", "finish")
        assert (finish.payload, finish.ranks) == (each.gradients, 2)
    assert "stages on two ranks: no run" in str(bill)


def test_the_bill_as_text_and_data():
    bill = pipeline(SPEC, schedule.gpipe(3, 2), **SIZE, recompute="full")
    text, data = str(bill), json.loads(json.dumps(bill.to_dict()))
    assert "3 stages on 3 ranks, 2 micro-batches of 2 × 3 tokens, fp32, full recomputation" in text
    assert "layer 0, embedding: 168 params" in text and "4 messages" not in text and "8 messages × 6 tokens" in text
    assert [each["activations"] for each in data["ranks"]] == [each.activations for each in bill.ranks]
    assert data["hop"] == 96 and data["ranks"][2]["stages"][0]["layers"] == [2, 3]
    assert "on rank 1 of its pipeline" in str(bill.traffic(1)) and "<table" in bill._repr_html_()
    alike = pipeline(ModelSpec(**SIZES | dict(layers=12)), schedule.gpipe(6, 2), **SIZE)
    assert "ranks 1–4, each: states   2 layers: 256 params" in str(alike)
    assert "no layer: 0 params" in str(pipeline(ModelSpec(**SIZES | dict(layers=2)), schedule.gpipe(4, 2), **SIZE))


GPIPE = schedule.gpipe(2, 2)


@pytest.mark.parametrize(("change", "message"), [
    (dict(orders=[GPIPE[0], GPIPE[1][:-1]]), "deadlock"),
    (dict(orders=None), "tp = 1 has no pipeline: give a layout with pp of 2 or more"),
    (dict(layout=Layout(pp=4)), "the schedule is for 2 ranks, and pp = 4"),
    (dict(layout=Layout(dp=2, zero=2)), "zero = 2 sums gradients in every backward pass"),
    (dict(layout=Layout(4)), "tp = 4 does not cut the 2 heads"),
    (dict(batch=0), "batch must be"), (dict(dtype="int4"), "unknown dtype|int4"),
    (dict(weights=(1, 2)), "weights must be 3 numbers"), (dict(optimizer="muon"), "unknown optimizer 'muon'"),
    (dict(frozen=("layers.3",)), "has no layers.3 to freeze")])
def test_what_cannot_be_priced_is_refused(change, message):
    given = dict(spec=SPEC, orders=GPIPE) | SIZE | change
    with pytest.raises(ValueError, match=message):
        pipeline(given.pop("spec"), given.pop("orders"), **given)


def test_versions_of_no_rank_are_refused():
    with pytest.raises(ValueError, match="rank = 4 is none of 4 ranks"):
        weight_versions(4, 4)
    with pytest.raises(ValueError, match="PipeDream has one stage on each rank"):
        pipeline(SPEC, schedule.dualpipe_v(2, 4), **SIZE).stashed(0)
