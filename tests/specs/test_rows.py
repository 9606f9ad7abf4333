"""The rule by which numbers share a row and a row is cut, against hand arithmetic and its own inverse."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shardlab.specs.rows import FlatRow, rows_of

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=8)


def test_slices_by_hand():
    """5 + 1 + 7 numbers are padded to 16 for 4 ranks: the last has one number, and three of padding."""
    row = FlatRow((5, 1, 7), 4)
    assert (row.filled, row.numel, row.share, row.starts) == (13, 16, 4, (0, 5, 6))
    assert [list(row.slices(r)) for r in range(4)] == [
        [(0, 0, 4)], [(0, 4, 5), (1, 0, 1), (2, 0, 2)], [(2, 2, 6)], [(2, 6, 7)]]
    assert [row.held(r) for r in range(4)] == [4, 4, 4, 1]


def test_a_slice_may_be_padding_only():
    row = FlatRow((1, 1), 4)
    assert [list(row.slices(r)) for r in range(4)] == [[(0, 0, 1)], [(1, 0, 1)], [], []]


@given(SIZES, st.integers(1, 9))
def test_slices_cover_every_number_once(sizes, p):
    """Z1: offsets come from one function, ranks that hold padding only included."""
    row, seen = FlatRow(tuple(sizes), p), []
    for r in range(p):
        assert sum(last - first for _, first, last in row.slices(r)) == row.held(r) <= row.share
        seen += [(i, n) for i, first, last in row.slices(r) for n in range(first, last)]
    assert seen == [(i, n) for i, size in enumerate(sizes) for n in range(size)]
    assert 0 <= row.numel - row.filled < p


def test_rows_by_hand():
    """Of one kind, and of 10 bytes at most; what is larger alone has a row of its own."""
    tensors = [("a", 4), ("a", 6), ("a", 1), ("b", 1), ("a", 30), ("a", 2), ("a", 8)]
    assert rows_of(tensors, 10) == [[0, 1], [2], [3], [4], [5, 6]]
    assert rows_of([], 10) == []


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 40)), max_size=12), st.integers(1, 60))
def test_rows_keep_the_order_and_the_size(tensors, nbytes):
    rows = rows_of(tensors, nbytes)
    assert [i for row in rows for i in row] == list(range(len(tensors)))
    for row in rows:
        assert len({tensors[i][0] for i in row}) == 1
        assert len(row) == 1 or sum(tensors[i][1] for i in row) <= nbytes
    for one, other in pairwise(rows):  # none is closed too early
        assert tensors[one[-1]][0] != tensors[other[0]][0] or (
            sum(tensors[i][1] for i in one) + tensors[other[0]][1] > nbytes)
