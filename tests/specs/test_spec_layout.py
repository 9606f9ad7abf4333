"""Which degrees a model allows."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.cost import memory, traffic
from shardlab.specs import Layout, ModelSpec, dtype_of, find_model


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
