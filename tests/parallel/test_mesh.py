"""Groups along named axes: who stands with whom, and what is refused (FAULTS C9)."""

import pytest
import torch
import torch.distributed as dist

from shardlab import comm
from shardlab.parallel import mesh


def rows_and_columns(group):
    both = mesh.build(dp=2, tp=2)
    x = torch.tensor([10.0**group.rank()])
    sums = {axis: comm.all_reduce(x.clone(), group=both.get_group(axis)).item() for axis in ("dp", "tp")}
    return sums | {axis + " name": comm.axis_of(both.get_group(axis)) for axis in ("dp", "tp")}


def test_the_last_axis_has_neighbours_and_the_first_has_strides(pool):
    for rank, sums in enumerate(pool(4).run(rows_and_columns)):
        assert sums["tp"] == (11.0 if rank < 2 else 1100.0)
        assert sums["dp"] == (101.0 if rank % 2 == 0 else 1010.0)
        assert (sums["dp name"], sums["tp name"]) == ("dp", "tp")


def test_an_axis_over_all_ranks_has_its_own_name(pool):
    assert pool(3).run(lambda group: comm.axis_of(mesh.build(tp=3).get_group("tp"))) == ["tp"] * 3


def test_sizes_that_are_not_the_world_are_refused(pool):
    def wrong(group):
        try:
            mesh.build(dp=2, tp=2)
        except ValueError as error:
            return str(error)

    assert pool(2).run(wrong) == ["dp=2 × tp=2 makes 4 ranks, and there are 2"] * 2


def blocks(group):
    pair, whole = mesh.blocks(group, 2), mesh.blocks(group, 4)
    again = mesh.blocks(group, 2)
    try:
        mesh.blocks(group, 3)
    except ValueError as error:
        return dist.get_process_group_ranks(pair), dist.get_process_group_ranks(again), whole is group, str(error)


def test_blocks_are_neighbours(pool):
    for rank, (pair, again, same, said) in enumerate(pool(4).run(blocks)):
        assert pair == again == ([0, 1] if rank < 2 else [2, 3]) and same
        assert said == "a group of 4 ranks has no blocks of 3"


def of_a_part(group):
    """Blocks of a group that is not the world: by its own order of ranks."""
    axis = mesh.build(dp=2, tp=2).get_group("dp")
    return dist.get_process_group_ranks(mesh.blocks(axis, 1)), group.rank()


@pytest.mark.parametrize("p", [4])
def test_blocks_of_an_axis(pool, p):
    assert all(ranks == [rank] for ranks, rank in pool(p).run(of_a_part))
