"""Which degrees a model allows."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.cost import memory, traffic
from shardlab.specs import Experts, Layout, ModelSpec, dtype_of, find_model


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
