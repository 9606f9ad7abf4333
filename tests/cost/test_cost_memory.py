"""Bytes held by each rank, against hand arithmetic and against PyTorch's own optimizers."""

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.cost import memory
from shardlab.specs import Experts, Latent, Layout, ModelSpec, dtype_of, format_of
from shardlab.specs.model import GROUPS

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
SIZES = dict(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=90, vocab=101)
EVERYTHING = SIZES | dict(attention_bias=True, output_bias=True, mlp_bias=True, qk_norm=True)


def test_one_rank_holds_the_model():
    spec = ModelSpec(**EVERYTHING)
    for dtype, width in (("fp32", 4), ("bf16", 2), ("float64", 8), ("fp16", 2)):
        bill = memory(spec, dtype=dtype)
        assert bill.weights == bill.per_rank == width * spec.total
        assert bill.groups == {group: width * n for group, n in spec.parameters.items()}
        assert bill.gradients == bill.states == bill.copied == bill.padding == 0


def test_four_ranks_by_hand():
    """heads 4 / 4 = 1 a rank; 2 KV heads, each on two ranks; ffn 90 padded to 92, vocabulary 101 to 104."""
    bill = memory(ModelSpec(**EVERYTHING), Layout(tp=4), training=True)
    attention = 3 * (8 * 32 + 8) + 32 * 8 + 32  # q, k, v with their cut biases; o with its whole one
    mlp = 2 * (23 * 32 + 23) + 32 * 23 + 32
    assert bill.elements == {"embedding": 26 * 32, "attention": 2 * attention, "mlp": 2 * mlp,
                             "experts": 0, "shared": 0, "router": 0,
                             "norms": 2 * (2 * 32 + 2 * 8) + 32, "head": 26 * 32}
    held = sum(bill.elements.values())
    assert (bill.weights, bill.gradients, bill.moments) == (4 * held, 4 * held, 8 * held)
    assert bill.steps == 4 * (2 + 2 * (4 + 4 + 3 + 3 + 4) + 1)  # weights and biases, a layer; norms
    assert bill.per_rank == bill.weights + bill.gradients + bill.states == sum(bill.groups.values())
    padding = 2 * 3 * 32 + 2 * 2 * (3 * 32 + 2)  # rows of embedding and head; of gate, up and down, and of two biases
    kv, whole = 2 * 2 * (16 * 32 + 16), 3 * (2 * 2 * 32 + 2 * (2 * 32 + 2 * 8) + 32)
    assert (bill.padding, bill.copied) == (padding, kv + whole)
    assert 4 * held == ModelSpec(**EVERYTHING).total + padding + kv + whole


def test_a_tied_head_is_held_once():
    tied, untied = ModelSpec(**SIZES, tied=True), ModelSpec(**SIZES)
    assert memory(untied, Layout(2)).weights - memory(tied, Layout(2)).weights == 4 * 51 * 32
    assert memory(tied, Layout(2)).groups["head"] == 0


@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "sgd+momentum"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
def test_states_are_what_pytorch_keeps(optimizer, p, dtype):
    torch = pytest.importorskip("torch")
    spec, layout = ModelSpec(**EVERYTHING), Layout(p)
    bill = memory(spec, layout, dtype, training=True, optimizer=optimizer)
    stored = getattr(torch, dtype_of(dtype).torch)
    weights = [torch.nn.Parameter(torch.zeros(t.local_shape(p), dtype=stored)) for t in spec.tensors()]
    make = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD,
            "sgd+momentum": lambda w: torch.optim.SGD(w, momentum=0.9)}[optimizer](weights)
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    make.step()
    states = [s for state in make.state.values() for s in state.values() if s is not None]
    assert bill.weights == sum(w.nbytes for w in weights)
    assert bill.gradients == sum(w.grad.nbytes for w in weights)
    assert bill.states == sum(s.nbytes for s in states)


@settings(deadline=None)
@given(heads=st.sampled_from([(8, 8), (8, 4), (8, 2), (8, 1), (12, 3), (9, 3), (6, 6)]), tp=st.integers(1, 8),
       ffn=st.integers(1, 200), vocab=st.integers(1, 300), flags=st.tuples(*[st.booleans()] * 5))
def test_the_ranks_hold_the_model_and_no_less(heads, tp, ffn, vocab, flags):
    choices = dict(zip(("tied", "attention_bias", "output_bias", "mlp_bias", "qk_norm"), flags, strict=True))
    spec = ModelSpec(**SIZES | dict(heads=heads[0], kv_heads=heads[1], ffn=ffn, vocab=vocab), **choices)
    layout = Layout(tp)
    try:
        layout.check(spec)
    except ValueError:
        with pytest.raises(ValueError, match="does not cut"):
            memory(spec, layout)
        return
    bill = memory(spec, layout, training=True)
    assert bill.weights == sum(4 * math.prod(t.local_shape(tp)) for t in spec.tensors())
    assert tp * bill.weights == 4 * (spec.total + bill.copied + bill.padding)
    assert bill.copied >= (tp - 1) * sum(t.size for t in spec.tensors() if t.cut == "whole") >= 0
    assert bill.padding >= 0
    assert tuple(bill.groups) == GROUPS
    if ffn % tp == 0 == vocab % tp:
        assert bill.padding == 0


def test_weights_of_a_model_that_divides_are_shared_out_but_for_the_norms():
    spec = ModelSpec.from_config(CONFIGS / "llama-3.1-70b.json")
    norms = spec.parameters["norms"]
    assert memory(spec, Layout(8), "bf16").weights * 8 == 2 * (spec.total + 7 * norms)


def test_mixed_precision_keeps_16_bytes_a_parameter_or_18():
    """ZeRO's 2 + 2 + 12, and Megatron-LM's with main gradients in fp32; step counters come to that."""
    spec = ModelSpec(**EVERYTHING)
    mixed = memory(spec, dtype="bf16", training=True, master="fp32")
    n = spec.total
    assert (mixed.weights, mixed.gradients, mixed.master_weights, mixed.moments) == (2 * n, 2 * n, 4 * n, 8 * n)
    assert mixed.states == mixed.master_weights + mixed.moments + mixed.steps
    assert mixed.per_rank - mixed.steps == 16 * n
    main = memory(spec, dtype="bf16", training=True, master="fp32", gradients="fp32")
    assert main.per_rank - main.steps == 18 * n
    plain = memory(spec, dtype="bf16", training=True, master="fp32", optimizer="sgd")
    assert plain.per_rank == 8 * n
    assert sum(mixed.groups.values()) == mixed.per_rank
    own = memory(spec, dtype="fp32", training=True, master="fp32")  # its own master weights
    assert own.master_weights == 0 and own.per_rank == memory(spec, dtype="fp32", training=True).per_rank


MIXTURE = dict(experts=Experts(routed=6, active=2, ffn=20, shared=1, first_dense=1, routing_bias=True),
               latent=Latent(kv_rank=12, rope_dim=4, nope_dim=6, value_dim=10, q_rank=14), layers=3, kv_heads=4)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8", "int4", "fp8", "mxfp4", "fp4-fp8"])
@pytest.mark.parametrize("p", [1, 2, 4])
def test_weights_are_every_tensor_in_its_format(dtype, p):
    spec = ModelSpec(**SIZES | MIXTURE)
    bill, form = memory(spec, Layout(p), dtype), format_of(dtype)
    assert bill.weights == sum(form.of(t.group, t.local_shape(p)).nbytes(t.local_shape(p)) for t in spec.tensors())
    assert bill.weights == bill.per_rank == sum(bill.groups.values())
    experts = bill.stored["experts"]
    assert bill.weights - bill.active == experts - experts * 2 // 6 > 0


def test_what_leads_down_to_a_latent_is_whole_on_every_rank_and_the_heads_are_cut():
    spec = ModelSpec(**SIZES | MIXTURE)
    shapes = {t.name: t.local_shape(4) for t in spec.layer_tensors(1) if "self_attn" in t.name}
    assert shapes == {
        "self_attn.q_a_proj.weight": (14, 32), "self_attn.q_a_layernorm.weight": (14,),
        "self_attn.q_b_proj.weight": (10, 14), "self_attn.kv_a_proj_with_mqa.weight": (16, 32),
        "self_attn.kv_a_layernorm.weight": (12,), "self_attn.kv_b_proj.weight": (16, 12),
        "self_attn.o_proj.weight": (32, 10)}


def test_quantised_weights_are_not_trained():
    for dtype in ("int8", "mxfp4"):
        with pytest.raises(ValueError, match=f"weights stored as {dtype} are served, not trained here: train with"):
            memory(ModelSpec(**SIZES), dtype=dtype, training=True)
    with pytest.raises(ValueError, match="master = 'fp32' and gradients = None are held in training"):
        memory(ModelSpec(**SIZES), dtype="bf16", master="fp32")


@pytest.mark.parametrize(("keys", "message"), [
    (dict(dtype="fp31"), r"unknown dtype 'fp31': use one of fp64 \(float64\), fp32 \(float32\), bf16"),
    (dict(optimizer="adam"), "unknown optimizer 'adam': use one of adamw, sgd, sgd.momentum"),
    (dict(layout=Layout(3)), "tp = 3 does not cut the 4 heads and 2 KV heads of model"),
])
def test_what_cannot_be_billed_is_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        memory(ModelSpec(**SIZES), **keys)
