"""Each region's backward against finite differences of the total loss in float64.

The loss is a different function on each rank (pytorch/pytorch#153016: with equal ones a wrong conjugate can pass), or,
where a region gives every rank the same whole tensor, the same function, counted once.
"""

import pytest
import torch

from shardlab import comm
from shardlab.comm import regions

STEP = 1e-6
#          region                   input     result is used
REGIONS = {"copy_to": ("whole", "differently"), "reduce_from": ("own", "alike"),
           "scatter_to": ("whole", "differently"), "gather_from": ("own", "alike"),
           "all_gather": ("own", "differently"), "reduce_scatter": ("own", "differently")}


def total(group, region, dim, x, used):
    """The loss over all ranks, and this rank's share of it as a tensor."""
    y = getattr(regions, region)(x, group) if dim is None else getattr(regions, region)(x, group, dim)
    seed = 1 if used == "alike" else 1 + group.rank()
    weight = torch.linspace(1, 2, y.numel(), dtype=torch.float64).view_as(y) * seed
    share = (torch.sin(y * seed) * weight).sum()
    if used == "alike":
        return share.item(), share
    return comm.all_reduce(share.detach().clone(), group=group).item(), share


def differences(group, region, dim):
    """The largest distance between backward's gradient and the finite differences, over the input's elements."""
    given, used = REGIONS[region]
    r, p = group.rank(), group.size()
    shape = (2 * p, 3) if dim in (None, 0) else (2, 3 * p)
    x = torch.arange(6 * p, dtype=torch.float64).view(shape) / 7 + (0.3 * r if given == "own" else 0)
    x.requires_grad_()
    total(group, region, dim, x, used)[1].backward()
    worst = 0.0
    for owner in range(p if given == "own" else 1):
        for i in range(x.numel()):
            moved = x.detach().clone().view(-1)
            ends = []
            for step in (STEP, -STEP):
                shifted = moved.clone()
                shifted[i] += step if given == "whole" or r == owner else 0
                ends.append(total(group, region, dim, shifted.view(shape), used)[0])
            if given == "whole" or r == owner:
                worst = max(worst, abs((ends[0] - ends[1]) / (2 * STEP) - x.grad.view(-1)[i].item()))
    return worst


@pytest.mark.parametrize("p", [2, 3])
@pytest.mark.parametrize("region", REGIONS)
def test_backward_is_the_derivative_of_the_total_loss(pool, region, p):
    for dim in (None,) if region in ("copy_to", "reduce_from") else (0, -1):
        assert max(pool(p).run(differences, region, dim)) < 1e-6


def forwards(group):
    r, p = group.rank(), group.size()
    x = torch.arange(2.0 * p).view(p, 2) + 100 * r
    whole = torch.arange(2.0 * p).view(p, 2)
    return {"copy_to": regions.copy_to(x, group), "reduce_from": regions.reduce_from(x, group),
            "scatter_to": regions.scatter_to(whole, group, 0), "gather_from": regions.gather_from(x, group, 1),
            "all_gather": regions.all_gather(x, group, 0), "reduce_scatter": regions.reduce_scatter(x, group, 0),
            "x": x}


@pytest.mark.parametrize("p", [2, 3, 4])
def test_forward_is_what_the_table_says(pool, p):
    base = torch.arange(2.0 * p).view(p, 2)
    xs = [base + 100 * r for r in range(p)]
    for r, out in enumerate(pool(p).run(forwards)):
        assert torch.equal(out["x"], xs[r]) and torch.equal(out["copy_to"], xs[r])  # the input is not written to
        assert torch.equal(out["reduce_from"], sum(xs))
        assert torch.equal(out["scatter_to"], base[r : r + 1])
        assert torch.equal(out["gather_from"], torch.cat(xs, 1))
        assert torch.equal(out["all_gather"], torch.cat(xs, 0))
        assert torch.equal(out["reduce_scatter"], sum(xs)[r : r + 1])


def test_a_dim_that_is_not_there_is_refused(pool):
    def beyond(group):
        said = []
        for name in ("scatter_to", "gather_from", "all_gather", "reduce_scatter"):
            for dim in (2, -3):
                try:
                    getattr(regions, name)(torch.ones(2, 2), group, dim)
                except ValueError as error:
                    said.append(str(error))
        return said

    assert pool(2).run(beyond) == [[f"(2, 2) has no dim {dim}" for dim in (2, -3)] * 4] * 2


def test_a_slice_that_does_not_divide_is_refused(pool):
    def uneven(group):
        try:
            regions.scatter_to(torch.ones(3), group, 0)
        except ValueError as error:
            return str(error)

    assert all("(3,)" in said and "2 ranks" in said for said in pool(2).run(uneven))


def test_on_one_rank_a_region_is_its_input(pool):
    def alone(group):
        x = torch.ones(2, requires_grad=True)
        with comm.record() as ledger:
            same = [getattr(regions, name)(x, group) is x for name in REGIONS]
        return same, len(ledger.entries)

    assert pool(1).run(alone) == [([True] * 6, 0)]
