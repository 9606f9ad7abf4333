"""Slices and their inverse, ranks that hold padding only among them (FAULTS Z1, Z3, Z4)."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shardlab.model.parameters import Window
from shardlab.parallel.shard import parameter, shard, take, unshard, window
from shardlab.specs import padded


@given(n=st.integers(1, 60), p=st.integers(1, 9), dim=st.integers(0, 2))
def test_unshard_is_the_inverse_of_shard(n, p, dim):
    shape = [2, 3, 4]
    shape[dim] = n
    whole = torch.arange(24 // (2, 3, 4)[dim] * n).view(shape) + 1
    shards = [shard(whole, p, r, dim) for r in range(p)]
    assert {s.shape for s in shards} == {torch.Size([*shape[:dim], padded(n, p) // p, *shape[dim + 1 :]])}
    assert torch.equal(unshard(shards, n, dim), whole)
    pads = torch.cat(shards, dim).narrow(dim, n, padded(n, p) - n)
    assert not pads.any() and all(s.is_contiguous() for s in shards)


@given(n=st.integers(1, 60), p=st.integers(1, 9))
def test_windows_cover_every_row_once_and_no_pad(n, p):
    rows = [i for r in range(p) for i in range(window(n, p, r, 0).start, window(n, p, r, 0).stop)]
    assert rows == list(range(n))


def test_a_shard_is_a_copy():
    whole = torch.zeros(4)
    shard(whole, 2, 0)[:] = 1
    assert not whole.any()


def test_a_cut_parameter_knows_its_window_and_stays_frozen():
    rows = Window(dim=1, start=1, stop=3, full=3)
    cut = parameter(nn.Parameter(torch.arange(6.0).view(2, 3), requires_grad=False), rows, 3)
    assert cut.window == rows and not cut.requires_grad
    assert cut.tolist() == [[1, 2, 0], [4, 5, 0]] == take(torch.arange(6.0).view(2, 3), rows, 3).tolist()
