"""Rows of parameters: laid out, cut into slices that go through parameters anywhere, and put together again."""

import pytest
import torch
from torch import nn

from shardlab.parallel.flat import Flat, Slice, buckets

SHAPES = [(1,), (2,), (57,), (5, 7), (), (3, 1, 4)]  # FAULTS Z1, Z3, Z4


def parameters(shapes=SHAPES, dtype=torch.float32):
    counted = torch.arange(1, 1 + sum(torch.Size(shape).numel() for shape in shapes), dtype=dtype)
    return [nn.Parameter(part.view(shape).clone()) for part, shape in
            zip(counted.split([torch.Size(shape).numel() for shape in shapes]), shapes, strict=True)]


@pytest.mark.parametrize("p", [1, 2, 3, 4, 200])
@pytest.mark.parametrize("shapes", [*([shape] for shape in SHAPES), SHAPES, SHAPES[::-1]])
def test_slices_put_together_are_the_parameters(shapes, p):
    """The padding, which may be all that a slice holds, is zeros and nobody's."""
    given = parameters(shapes)
    before = [each.detach().clone() for each in given]
    flat = Flat(given, p)
    row = flat.lay()
    assert row.shape == (flat.numel,) and flat.numel == p * flat.share >= sum(each.numel() for each in given)
    assert not row[sum(each.numel() for each in given) :].any()
    found = {each: [] for each in given}
    for r in range(p):
        cut = Slice(flat, r)
        mine = cut.of(row)
        assert mine.shape == (flat.share,)
        parts = [cut.part(mine, each) for each in cut.spans]
        assert sum(part.numel() for part in parts) == int((mine != 0).sum())
        for each, part in zip(cut.spans, parts, strict=True):
            first, last = cut.spans[each]
            assert torch.equal(part, each.detach().flatten()[first:last])
            found[each].append(part)
    for each, whole in zip(given, before, strict=True):
        assert torch.equal(torch.cat(found[each]).view(whole.shape), whole) and torch.equal(each, whole)
        assert each.untyped_storage().data_ptr() == row.untyped_storage().data_ptr()


def test_a_part_is_the_memory_itself():
    given = parameters()
    flat = Flat(given, 3)
    row, cut = flat.lay(), Slice(flat, 1)
    for each in cut.spans:
        cut.part(cut.of(row), each).fill_(-1)
    assert sum(int((each < 0).sum()) for each in given) == sum(last - first for first, last in cut.spans.values())


def test_buckets_are_of_one_dtype_and_of_a_size_at_most():
    small, low = parameters([(10,), (10,), (30,)]), parameters([(10,)], torch.bfloat16)
    rows = buckets([*small, *low, *parameters([(5,)])], 2, 100)
    assert [[each.numel() for each in row.parameters] for row in rows] == [[10, 10], [30], [10], [5]]
    assert [(row.dtype, row.numel) for row in rows] == [
        (torch.float32, 20), (torch.float32, 30), (torch.bfloat16, 10), (torch.float32, 6)]
