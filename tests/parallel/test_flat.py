"""Rows of parameters, and their slices put together: ranks that hold padding only among them (FAULTS Z1, Z3, Z4)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shardlab.parallel.flat import Flat, Slice, buckets

SHAPES = st.lists(st.sampled_from([(1,), (2,), (57,), (5, 7), (7, 5), (3, 2, 4), (1, 1)]), min_size=1, max_size=6)
RANKS = st.integers(1, 5)


def numbered(shapes, dtype=torch.float64):
    """Parameters in which every number is another: 1, 2, 3 …"""
    ends = torch.tensor([0, *(torch.Size(shape).numel() for shape in shapes)]).cumsum(0).tolist()
    return [nn.Parameter(torch.arange(start + 1, start + 1 + torch.Size(shape).numel(), dtype=dtype).view(shape))
            for start, shape in zip(ends, shapes, strict=False)]


@given(SHAPES, RANKS)
def test_slices_put_together_are_the_parameters(shapes, p):
    parameters = numbered(shapes)
    before = [parameter.detach().clone() for parameter in parameters]
    flat = Flat(parameters, p)
    row = flat.lay()
    total = sum(parameter.numel() for parameter in parameters)
    assert row.shape == (flat.numel,) and flat.numel == p * flat.share and flat.numel - total < p
    assert row.tolist() == [*range(1, total + 1), *[0] * (flat.numel - total)]  # in their order, then padding
    gathered = {parameter: [] for parameter in parameters}
    for r in range(p):
        slice = Slice(flat, r)
        memory = slice.of(row).clone()  # what a rank holds, and no more
        assert memory.shape == (flat.share,)
        for parameter, (first, last) in slice.spans.items():
            assert 0 <= first < last <= parameter.numel()
            gathered[parameter].append(slice.part(memory, parameter))
    for parameter, was in zip(parameters, before, strict=True):
        assert torch.equal(torch.cat(gathered[parameter]).view(was.shape), was)  # flattened first, then cut
        assert torch.equal(parameter, was)


@given(SHAPES, RANKS)
def test_a_parameter_and_its_parts_are_views_of_the_row_and_padding_is_nobodys(shapes, p):
    parameters = numbered(shapes)
    flat = Flat(parameters, p)
    row = flat.lay()
    for r in range(p):
        slice = Slice(flat, r)
        for parameter in slice.spans:
            slice.part(slice.of(row), parameter).neg_()
    with torch.no_grad():
        assert all((parameter < 0).all() for parameter in parameters)
        for parameter in parameters:
            parameter.fill_(7)
    total = sum(parameter.numel() for parameter in parameters)
    assert row.tolist() == [7] * total + [0] * (flat.numel - total)


@pytest.mark.parametrize("numel,p,held", [(1, 4, [1, 0, 0, 0]), (6, 4, [2, 2, 2, 0]), (2, 5, [1, 1, 0, 0, 0]),
                                          (57, 2, [29, 28]), (35, 3, [12, 12, 11]), (4, 4, [1, 1, 1, 1])])
def test_a_rank_may_hold_padding_only(numel, p, held):
    flat = Flat(numbered([(numel,)]), p)
    assert [sum(last - first for first, last in Slice(flat, r).spans.values()) for r in range(p)] == held
    assert {Slice(flat, r).of(flat.empty()).shape for r in range(p)} == {torch.Size([flat.share])}


def test_what_is_sent_has_zeros_for_padding():
    flat = Flat(numbered([(5, 7)]), 4)
    torch.empty(flat.numel, dtype=flat.dtype).fill_(torch.nan)  # memory that may be handed out again
    for _ in range(8):
        assert flat.empty()[35:].tolist() == [0]


@given(SHAPES, SHAPES, RANKS, st.integers(1, 600))
def test_buckets_hold_every_parameter_once_in_order_and_one_dtype_each(doubles, floats, p, nbytes):
    parameters = numbered(doubles) + numbered(floats, torch.float32) + numbered([(2,)])
    rows = buckets(parameters, p, nbytes)
    assert [id(each) for row in rows for each in row.parameters] == [id(each) for each in parameters]
    for row in rows:
        assert {each.dtype for each in row.parameters} == {row.dtype} and row.numel % p == 0
        assert len(row.parameters) == 1 or sum(each.nbytes for each in row.parameters) <= nbytes
