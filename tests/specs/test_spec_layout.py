"""Which degrees a model allows."""

from dataclasses import replace
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.cost import memory, traffic
from shardlab.schedule import size
from shardlab.specs import Experts, Layout, ModelSpec, dtype_of, find_model
from shardlab.specs.layout import staged


def spec(heads, kv_heads):
    return ModelSpec(name="some", hidden=64, layers=1, heads=heads, kv_heads=kv_heads, head_dim=16, ffn=96, vocab=101)


def test_world_size():
    assert (Layout().world_size, Layout(tp=4).world_size) == (1, 4)


@pytest.mark.parametrize("tp", [0, -2, True, 2.0, "2"])
def test_a_degree_is_a_whole_number(tp):
    with pytest.raises(ValueError, match="tp must be a whole number of at least 1"):
        Layout(tp)


@pytest.mark.parametrize(("heads", "kv_heads", "tp"), [
    (9, 3, 3), (9, 3, 9), (8, 2, 4), (8, 2, 8), (64, 8, 16), (4, 4, 4), (28, 4, 2), (1, 1, 1)])
def test_heads_may_be_shared_out_or_copied(heads, kv_heads, tp):
    Layout(tp).check(spec(heads, kv_heads))


@pytest.mark.parametrize(("heads", "kv_heads", "tp", "allowed"), [
    (9, 3, 2, "1, 3, 9"),
    (40, 10, 4, "1, 2, 5, 10, 20, 40"),  # T4: torchtitan#2577, deep in a reshape
    (12, 4, 6, "1, 2, 4, 12"),  # SV10: half a head each
    (12, 4, 24, "1, 2, 4, 12"),
])
def test_others_are_refused_with_what_would_do(heads, kv_heads, tp, allowed):
    message = f"tp = {tp} does not cut the {heads} heads and {kv_heads} KV heads of some .*; tp can be {allowed}$"
    with pytest.raises(ValueError, match=message):
        Layout(tp).check(spec(heads, kv_heads))


@settings(deadline=None)
@given(kv_heads=st.integers(1, 12), queries=st.integers(1, 8), tp=st.integers(1, 64))
def test_what_passes_leaves_whole_heads_on_every_rank(kv_heads, queries, tp):
    model = spec(kv_heads * queries, kv_heads)
    try:
        Layout(tp).check(model)
    except ValueError:
        return
    for tensor in model.layer_tensors():
        if tensor.unit == model.head_dim:
            dim = 1 if tensor.cut == "row" else 0
            assert tensor.local_shape(tp)[dim] % model.head_dim == 0
            assert tensor.local_shape(tp)[dim] * tp == tensor.shape[dim] * tensor.copies(tp)


def test_what_is_no_spec_and_no_layout_is_met_with_what_would_do():
    with pytest.raises(TypeError, match="find_model"):
        memory("llama-3.1-70b")
    with pytest.raises(TypeError, match=r"Layout\(tp=8\)"):
        memory(find_model("smollm2-135m"), 8)
    with pytest.raises(TypeError, match=r"Layout\(tp=8\)"):
        traffic(find_model("smollm2-135m"), 8, 1, 1)


def test_a_dtype_may_be_pytorchs_own():
    import torch
    assert dtype_of(torch.bfloat16) == dtype_of("bf16") == dtype_of("torch.bfloat16")


def test_the_world_is_data_times_tensor():
    assert Layout(4, dp=3).world_size == 12
    assert Layout(dp=2, tp=2, zero=3, sp="again").degrees == "dp = 2, tp = 2, ZeRO-3, sequence parallel (again)"
    assert (Layout().degrees, Layout(8).degrees, Layout(dp=2).degrees) == ("tp = 1", "tp = 8", "dp = 2")


@pytest.mark.parametrize(("keys", "message"), [
    (dict(dp=0), "dp must be a whole number of at least 1, not 0"),
    (dict(dp=2, zero=4), "zero = 4 is no stage of ZeRO"), (dict(dp=2, zero=-1), "zero must be a whole number"),
    (dict(dp=2, zero=True), "zero must be a whole number"),
    (dict(zero=1), "zero = 1 shares out over .* dp = 1 is a single one: give dp of 2 or more, or zero = 0"),
    (dict(tp=2, sp=True), "sp must be False, 'keep' or 'again', not True"),
    (dict(tp=2, sp=None), "sp must be False, 'keep' or 'again', not None"),
    (dict(tp=2, sp=0), "sp must be False, 'keep' or 'again', not 0"),
    (dict(sp="keep"), "sp = 'keep' cuts .* tp = 1 is a single one: give tp of 2 or more, or sp = False"),
])
def test_what_has_nothing_to_share_among_is_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        Layout(**keys)


def mixture(routed, **sizes):
    return ModelSpec(name="some", hidden=64, layers=2, heads=8, kv_heads=8, head_dim=16, ffn=96, vocab=101,
                     experts=Experts(routed=routed, active=2, ffn=32), **sizes)


def test_experts_lie_over_ranks_that_are_there_already():
    v3 = find_model("deepseek-v3")
    training, decode = Layout(dp=128, ep=64), Layout(4, dp=80, ep=320, etp=1)
    training.check(v3)
    decode.check(v3, redundant=64)
    assert (training.world_size, training.expert_replicas) == (128, 2)
    assert (decode.world_size, decode.expert_replicas) == (320, 1)
    assert Layout(2, dp=2, cp=3).world_size == 12
    assert (Layout(2, dp=2, cp=3, zero=1).data_ranks, Layout(cp=2, zero=1).data_ranks) == (6, 2)
    layouts = [Layout(4, dp=2, **keys) for keys in (dict(ep=2), dict(ep=2, etp=1), dict(etp=1), dict(etp=4))]
    assert [layout.expert_tp for layout in layouts] == [4, 1, 1, 4]
    assert [layout.expert_replicas for layout in layouts] == [1, 4, 8, 2]
    assert [Layout(4, **keys).spreads for keys in (dict(), dict(etp=4), dict(etp=1), dict(dp=2, ep=2))] == [
        False, False, True, True]
    assert Layout(2, dp=4, cp=3, ep=2, etp=1, zero=1).degrees == "dp = 4, cp = 3, tp = 2, ep = 2, etp = 1, ZeRO-1"


@pytest.mark.parametrize(("keys", "message"), [
    (dict(cp=0), "cp must be a whole number of at least 1, not 0"),
    (dict(ep=True), "ep must be a whole number of at least 1, not True"),
    (dict(etp=0), "etp must be a whole number of at least 1, not 0"),
    (dict(tp=4, etp=2), "etp = 2: an expert is cut as the layers are, etp = tp = 4, or is whole on a rank, etp = 1"),
    (dict(dp=2, cp=3, tp=2, ep=4), r"ep = 4 does not divide dp · cp = 6 ranks, .*: ep can be 1, 2, 3, 6$"),
    (dict(dp=3, tp=2, ep=4, etp=1), r"ep = 4 does not divide dp · cp · tp = 6 ranks, .*: ep can be 1, 2, 3, 6$"),
    (dict(zero=1), "zero = 1 shares out over .* dp = 1 is a single one"),
])
def test_experts_that_ranks_dont_share_out_are_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        Layout(**keys)


def test_a_models_experts_are_shared_out_equally():
    Layout(dp=6, ep=3).check(mixture(6))
    with pytest.raises(ValueError, match=r"ep = 2 does not share out the 7 experts of some .* 2 ranks ep can be 1$"):
        Layout(dp=2, ep=2).check(mixture(7))
    with pytest.raises(ValueError, match=r"ep = 4 .* the 6 experts of some .* 12 ranks ep can be 1, 2, 3, 6$"):
        Layout(dp=12, ep=4).check(mixture(6))
    with pytest.raises(ValueError, match=r"ep = 4 .* 6 experts and 1 redundant ones of .* ep can be 1$"):
        Layout(dp=4, ep=4).check(mixture(6), redundant=1)
    Layout(dp=4, ep=4).check(mixture(6), redundant=2)
    for keys, redundant, named in ((dict(dp=2, ep=2), 0, "ep = 2, etp = 1"), (dict(tp=2, etp=1), 0, "ep = 1, etp = 1"),
                                   (dict(), 3, "redundant = 3")):
        with pytest.raises(ValueError, match=f"{named}: some has no experts; leave it out"):
            Layout(**keys).check(spec(8, 8), redundant)


@pytest.mark.parametrize(("keys", "message"), [
    (dict(pp=0), "pp must be a whole number of at least 1, not 0"),
    (dict(microbatches=0), "microbatches must be a whole number of at least 1, not 0"),
    (dict(pp=2, chunks=1.0), "chunks must be a whole number of at least 1, not 1.0"),
    (dict(pp=2, schedule="zerobubble"), "schedule = 'zerobubble' is none of gpipe, 1f1b, interleaved, zero_bubble, "
                                        "dualpipe_v, dualpipe$"),
    (dict(schedule="gpipe"), "schedule = 'gpipe', chunks = 1: .* pp = 1 is a single stage: give pp of 2 or more, or "),
    (dict(chunks=2), "schedule = None, chunks = 2: .* pp = 1 is a single stage: give pp of 2 or more, or leave them"),
    (dict(pp=2, dp=2, zero=2), "zero = 2 sums .* with pp = 2 is once .*: take zero = 1, .* or pp = 1"),
    (dict(pp=2, cp=2, zero=3), "zero = 3 sums .* with pp = 2 is once .*: take zero = 1, .* or pp = 1"),
    (dict(pp=2, zero=1), "zero = 1 .* dp = 1 is a single one: give dp of 2 or more, or zero = 0"),
    (dict(pp=2, schedule="interleaved", microbatches=2), "chunks = 1 is 1f1b: give chunks of 2 or more, or schedule ="),
    (dict(pp=2, chunks=2), "1f1b has 1 stage on each rank, not chunks = 2: give chunks = 1, or .* 'interleaved'"),
    (dict(pp=2, schedule="dualpipe_v", microbatches=4), "dualpipe_v has 2 stages on each rank, not chunks = 1: give "
                                                        "chunks = 2, or schedule = 'interleaved'"),
    (dict(pp=4, schedule="interleaved", microbatches=6, chunks=2), "microbatches = 6 is no multiple of 4, .* 4 or 8$"),
    (dict(pp=4, schedule="interleaved", microbatches=3, chunks=2), "microbatches = 3 is no multiple of 4, .* take 4$"),
    (dict(pp=4, schedule="dualpipe_v", microbatches=7, chunks=2), "microbatches = 7 is below 8, .* take 8 or more$"),
    (dict(pp=4, schedule="dualpipe", microbatches=9, chunks=2), "microbatches = 9 is no multiple of 2, .* 8 or 10$"),
    (dict(pp=3, schedule="dualpipe", microbatches=8, chunks=2), "ranks = 3 is no multiple of 2, .* take 2 or 4$"),
    (dict(order="dp-tp"), "order = 'dp-tp' must name each axis of 'pp-dp-tp' once, the outermost first"),
    (dict(order="pp-dp-tp-tp"), "order = 'pp-dp-tp-tp' must name each axis of 'pp-dp-tp' once"),
    (dict(order=None), "order = None must name each axis of 'pp-dp-tp' once"),
    (dict(dp=2, ep=2, order="tp-dp-pp"), "ep = 2 .* order = 'tp-dp-pp' parts: take 'pp-dp-tp' or 'dp-tp-pp'"),
])
def test_pipelines_and_orders_that_there_are_not_are_refused_with_what_would_do(keys, message):
    with pytest.raises(ValueError, match=message):
        Layout(**keys)


@pytest.mark.parametrize(("keys", "message"), [
    (dict(pp=4), "pp = 4 makes 4 stages, and some has 3 layers: some stages would have none; 3 stages at most"),
    (dict(pp=2, schedule="interleaved", chunks=2, microbatches=2), "pp = 2 × chunks = 2 makes 4 stages, .* 3 stages"),
])
def test_a_stage_has_a_layer_at_least(keys, message):
    three = ModelSpec(name="some", hidden=64, layers=3, heads=8, kv_heads=8, head_dim=16, ffn=96, vocab=101)
    Layout(pp=3).check(three)
    Layout(pp=2, schedule="dualpipe", chunks=2, microbatches=4).check(three)  # two stages, each on two ranks
    with pytest.raises(ValueError, match=message):
        Layout(**keys).check(three)


def test_the_world_is_all_axes_but_experts():
    """SV32: ranks of a way of cutting that were counted as one."""
    layout = Layout(2, dp=3, pp=4, cp=5, ep=3, microbatches=4)
    assert (layout.world_size, layout.stage_ranks, layout.data_ranks) == (120, 30, 15)
    assert layout.degrees == "pp = 4, dp = 3, cp = 5, tp = 2, ep = 3, 1f1b"
    assert Layout(pp=2, schedule="interleaved", chunks=3, microbatches=2).degrees == (
        "pp = 2, interleaved of 3 stages a rank")


def test_a_layout_has_its_lists_of_actions():
    assert Layout().orders is None and (Layout().kind, Layout(pp=2).kind) == ("1f1b", "1f1b")
    for keys in (dict(), dict(schedule="gpipe"), dict(schedule="zero_bubble"), dict(schedule="interleaved", chunks=3),
                 dict(schedule="dualpipe_v", chunks=2)):
        layout = Layout(pp=2, microbatches=4, **keys)
        assert size(layout.orders) == (layout.stages, 4) and len(layout.orders) == 2
        assert layout.orders is layout.orders  # made once
        assert layout == Layout(pp=2, microbatches=4, **keys) and hash(layout) == hash(replace(layout))
    assert Layout(pp=4, microbatches=8, schedule="dualpipe", chunks=2).stages == 4


ORDERS = ["-".join(each) for each in permutations(("pp", "dp", "tp"))]


@pytest.mark.parametrize("order", ORDERS)
def test_places_are_the_coordinates_of_ranks_counted_from_the_inside(order):
    layout = Layout(2, dp=3, pp=2, cp=2, order=order, microbatches=2)
    axes = [axis for part in order.split("-") for axis in ((part, "cp") if part == "dp" else (part,))]
    assert list(layout.axes) == axes and layout.axes == {axis: getattr(layout, axis) for axis in axes}
    places = [layout.place(rank) for rank in range(24)]
    coordinates = [tuple(place[axis] for axis in axes) for place in places]
    assert coordinates == list(product(*(range(layout.axes[axis]) for axis in axes)))
    for axis in axes:  # the next along an axis is so many ranks on
        on = layout.distance(axis)
        for rank, place in enumerate(places):
            if place[axis] + 1 < layout.axes[axis]:
                assert places[rank + on] == {**place, axis: place[axis] + 1}
    assert {place["ep"] for place in places} == {0}


@pytest.mark.parametrize("order", ["pp-dp-tp", "dp-tp-pp"])
@pytest.mark.parametrize(("ep", "etp"), [(2, None), (4, None), (2, 1), (4, 1), (8, 1)])
def test_the_parts_of_experts_lie_over_neighbours_of_a_stage(order, ep, etp):
    layout = Layout(2, dp=2, pp=2, cp=2, ep=ep, etp=etp, order=order, microbatches=2)
    places = [layout.place(rank) for rank in range(16)]
    for stage in range(2):
        ranks = [rank for rank in range(16) if places[rank]["pp"] == stage]
        assert [places[rank]["ep"] for rank in ranks] == [i // layout.expert_tp % ep for i in range(8)]
        on = layout.distance("ep")
        for rank in ranks:
            if rank + on in ranks and places[rank]["ep"] + 1 < ep:
                assert places[rank + on]["ep"] == places[rank]["ep"] + 1
    assert layout.distance("ep") == layout.expert_tp * (2 if order == "dp-tp-pp" else 1)
    assert layout.expert_replicas * ep * layout.expert_tp == layout.stage_ranks == 8


def test_a_rank_that_there_is_not_has_no_place():
    assert Layout(2, dp=2).place(3) == dict(pp=0, dp=1, cp=0, tp=1, ep=0)
    with pytest.raises(ValueError, match="rank = 4 is none of 4 ranks: the last is 3"):
        Layout(2, dp=2).place(4)
    with pytest.raises(ValueError, match="rank must be a whole number of at least 0, not -1"):
        Layout(2, dp=2).place(-1)


def test_an_account_of_all_layers_refuses_a_pipeline():
    with pytest.raises(ValueError, match=r"pp = 2: .* take cost\.pipeline, or leave pp out"):
        staged(Layout(pp=2))
    assert staged(None) == Layout()
