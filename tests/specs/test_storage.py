"""Formats of stored weights: bytes counted block by block."""

import math
import timeit

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.specs import find_model, format_of

QUANTISED = ("int8", "int4", "fp8", "mxfp4", "fp4-fp8")


def by_hand(packed, shape):
    """Bytes, one row and one block after another."""
    rows, columns = shape
    numbers = sum(math.ceil(columns * packed.bits / 8) for _ in range(rows))
    if packed.block is None:
        return numbers
    down, across = (step or n for step, n in zip(packed.block, shape, strict=True))
    return numbers + sum(packed.scale_bytes for _ in range(0, rows, down) for _ in range(0, columns, across))


@settings(deadline=None)
@given(name=st.sampled_from((*QUANTISED, "bf16", "fp32")), group=st.sampled_from(("mlp", "experts", "embedding")),
       shape=st.tuples(st.integers(1, 300), st.integers(1, 300)))
def test_bytes_are_those_of_all_rows_and_blocks(name, group, shape):
    packed = format_of(name).of(group, shape)
    assert packed.nbytes(shape) == by_hand(packed, shape)


@pytest.mark.parametrize(("name", "shape", "scales", "nbytes"), [
    ("int8", (3, 5), 3, 3 * (5 + 4)),
    ("int4", (3, 5), 3, 3 * (3 + 2)),
    ("int4", (2, 129), 4, 2 * (65 + 2 * 2)),
    ("fp8", (129, 128), 2, 129 * 128 + 2 * 4),
    ("fp8", (1, 1), 1, 5),
    ("mxfp4", (2, 33), 4, 2 * (17 + 2)),
    ("bf16", (3, 5), 0, 30),
    ("fp8", (2, 129, 128), 4, 2 * (129 * 128 + 2 * 4)),  # two matrices on top of each other: each has its own blocks
])
def test_known_bytes(name, shape, scales, nbytes):
    packed = format_of(name).expert
    assert (packed.scales(shape), packed.nbytes(shape)) == (scales, nbytes)


@pytest.mark.parametrize(("name", "bits"), [("int8", 8 + 32 / 4096), ("int4", 4.125), ("fp8", 8 + 32 / 128**2),
                                            ("mxfp4", 4.25)])
def test_bits_a_number(name, bits):
    assert format_of(name).expert.nbytes((4096, 4096)) * 8 / 4096**2 == bits


def test_each_group_is_stored_in_its_own_way():
    square = (256, 256)
    groups = ("attention", "mlp", "shared", "experts", "embedding", "head", "router")
    assert {name: [format_of(name).of(group, square).name for group in groups] for name in QUANTISED} == {
        "int8": ["int8"] * 4 + ["bf16"] * 3, "int4": ["int4"] * 4 + ["bf16"] * 3, "fp8": ["fp8"] * 4 + ["bf16"] * 3,
        "mxfp4": ["bf16"] * 3 + ["mxfp4"] + ["bf16"] * 3, "fp4-fp8": ["fp8"] * 3 + ["mxfp4"] + ["bf16"] * 3}
    assert {format_of(name).of(group, (256,)).name for name in QUANTISED for group in groups} == {"bf16"}  # biases


@pytest.mark.parametrize(("name", "bits"), [("fp64", 64), ("float32", 32), (torch.float32, 32), ("bf16", 16),
                                            (torch.bfloat16, 16), ("fp16", 16)])
def test_plain_formats_store_everything_alike(name, bits):
    form = format_of(name)
    assert {packed.bits for packed in form[1:]} == {bits}
    assert {packed.block for packed in form[1:]} == {None}
    assert format_of(form) is form


def test_the_rest_can_be_in_another_dtype():
    form = format_of("int4").beside("float32")
    assert (form.name, form.rest, form.matrix) == ("int4 beside fp32", format_of("fp32").rest, format_of("int4").matrix)
    with pytest.raises(ValueError, match="unknown dtype 'int8'"):
        form.beside("int8")


@pytest.mark.parametrize("name", ["int3", "FP8", torch.int8, None, 8])
def test_an_unknown_format_is_refused_with_all_names(name):
    with pytest.raises(ValueError, match=r"unknown dtype .*fp64.*fp32.*bf16.*fp16.* int8, int4, fp8, mxfp4, fp4-fp8$"):
        format_of(name)


def test_a_model_is_priced_fast():
    """10,000 bills have to take under 2 s, and each asks for every kind of tensor: that may take half of it."""
    tensors, form = [tensor for _, tensor in find_model("llama-3.1-70b").counted()], format_of("int4")

    def bill():
        return sum(form.of(tensor.group, tensor.shape).nbytes(tensor.shape) for tensor in tensors)

    assert min(timeit.repeat(bill, number=100, repeat=5)) / 100 * 10_000 < 1
