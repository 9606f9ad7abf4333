"""`out=` of reduce_scatter and all_gather: memory that is there, the tensor's own rows too, by every way."""

import pytest
import torch

from shardlab import comm

WAYS = [("backend", "backend"), ("backend", "shm"), ("ring", "backend"), ("ring", "shm")]


def both(group, algorithm, transport, n, dtype):
    p, r = group.size(), group.rank()
    x = (torch.arange(p * n) + 1000 * r).to(dtype).view(p, n)
    summed = sum(torch.arange(p * n) + 1000 * i for i in range(p)).to(dtype).view(p, n)
    with comm.use(algorithm, transport=transport):
        apart = torch.zeros(n, dtype=dtype)
        given = comm.reduce_scatter(x.flatten(), group=group, out=apart, async_op=True).wait()
        own = x.clone()
        comm.reduce_scatter(own.flatten(), group=group, out=own[r])
        gathered = torch.zeros(p, n, dtype=dtype)
        gathered[r] = x[0]
        same = comm.all_gather(gathered[r], group=group, out=gathered.view(-1)).data_ptr() == gathered.data_ptr()
    others = [i for i in range(p) if i != r]
    return {"apart": torch.equal(apart, summed[r]) and given.data_ptr() == apart.data_ptr(),
            "own rows": torch.equal(own[r], summed[r]), "other rows": torch.equal(own[others], x[others]),
            "gathered": same and torch.equal(gathered, torch.stack(
                [(torch.arange(n) + 1000 * i).to(dtype) for i in range(p)]))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("algorithm,transport", WAYS)
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_results_go_where_they_are_asked_to(pool, p, algorithm, transport, dtype):
    for n in (1, 5, 70_000):
        for seen in pool(p).run(both, algorithm, transport, n, dtype):
            assert all(seen.values()), (n, seen)


def refused(group):
    said = []
    for out in (torch.zeros(3), torch.zeros(4, dtype=torch.float64), torch.zeros(8)[::2]):
        for verb, x in ((comm.reduce_scatter, torch.zeros(8)), (comm.all_gather, torch.zeros(2))):
            with pytest.raises(ValueError, match="gives a contiguous") as error:
                verb(x, group=group, out=out)
            said.append(str(error.value))
    return said


def test_an_out_that_cannot_hold_the_result_is_refused(pool):
    for said in pool(2).run(refused):
        assert said[0] == ("reduce_scatter gives a contiguous (4,) torch.float32 on cpu, and out is (3,) "
                           "torch.float32 on cpu")
        assert said[-1].endswith("with strides (2,)")
