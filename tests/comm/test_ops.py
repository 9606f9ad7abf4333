"""The verbs against lists worked out by hand: values distinct by rank and position, strided, empty, of every dtype."""

import pytest
import torch

from shardlab import comm

WORLDS = [2, 3, 4]


def strided(rank, dtype=torch.float32):
    """Four values, distinct by rank and position, two apart in memory (FAULTS C1, C2)."""
    return (torch.arange(8).view(4, 2) + 100 * rank).to(dtype)[:, 0]


def plain(rank):
    return [100 * rank + 2 * i for i in range(4)]


def every_verb(group):
    r, p = group.rank(), group.size()
    out = {op: comm.all_reduce(strided(r), op, group).tolist() for op in ("sum", "max", "min")}
    out["product"] = comm.all_reduce(strided(r, torch.float64), "product", group).tolist()
    out["all_gather"] = comm.all_gather(strided(r), group).tolist()
    out["reduce_scatter"] = comm.reduce_scatter((torch.arange(4 * p).view(-1, 2) + 100 * r)[:, 0], group=group).tolist()
    out["broadcast"] = comm.broadcast(strided(r), src=p - 1, group=group).tolist()
    if r == 0:
        comm.send(strided(0), dst=1, group=group)
    elif r == 1:
        out["recv"] = comm.recv(strided(1), src=0, group=group).tolist()
    return out


@pytest.mark.parametrize("p", WORLDS)
def test_strided_tensors_give_the_values_of_contiguous_ones(pool, p):
    columns = list(zip(*(plain(r) for r in range(p)), strict=True))
    for r, out in enumerate(pool(p).run(every_verb)):
        assert out["sum"] == [sum(c) for c in columns]
        assert out["max"] == plain(p - 1) and out["min"] == plain(0)
        assert out["product"] == [float(torch.tensor(c, dtype=torch.float64).prod()) for c in columns]
        assert out["all_gather"] == [x for q in range(p) for x in plain(q)]
        ours = [2 * i for i in range(2 * p)][2 * r : 2 * r + 2]
        assert out["reduce_scatter"] == [p * x + 100 * sum(range(p)) for x in ours]
        assert out["broadcast"] == plain(p - 1)
        assert r != 1 or out["recv"] == plain(0)


def in_place(group):
    whole = torch.arange(8.0).view(4, 2) + 100 * group.rank()
    column = whole[:, 1]
    got = comm.all_reduce(column, group=group)
    return got is column, whole.tolist()


def test_an_in_place_verb_writes_its_strided_argument_and_nothing_beside_it(pool):
    for r, (same, whole) in enumerate(pool(2).run(in_place)):
        assert same
        assert whole == [[2 * i + 100 * r, 2 * (2 * i + 1) + 100] for i in range(4)]


def shapes(group):
    r, p = group.rank(), group.size()
    with comm.use(debug=True):
        scalar = comm.all_gather(torch.tensor(100 * r), group)
        empty = comm.all_gather(torch.empty(0, 3), group)
        sums = comm.all_reduce(torch.tensor(100.0 * r + 1), group=group), comm.all_reduce(torch.empty(0), group=group)
        block = comm.reduce_scatter(torch.empty(p, 0), group=group)
    return scalar.tolist(), tuple(empty.shape), sums[0].item(), tuple(sums[1].shape), tuple(block.shape)


@pytest.mark.parametrize("p", WORLDS)
def test_empty_and_zero_dimensional_tensors(pool, p):
    expected = ([100 * r for r in range(p)], (0, 3), 100.0 * sum(range(p)) + p, (0,), (1, 0))
    assert pool(p).run(shapes) == [expected] * p


def dtypes(group):
    out = {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8):
        x = torch.arange(3).to(dtype) + 10 * group.rank()
        out[str(dtype)] = (comm.all_reduce(x.clone(), group=group).tolist(), comm.all_gather(x, group).tolist(),
                           comm.broadcast(x.clone(), 1, group).tolist(), comm.all_reduce(x, group=group).dtype == dtype)
    return out


def test_each_dtype_that_the_library_moves(pool):
    for out in pool(2).run(dtypes):
        assert all(v == ([10, 12, 14], [0, 1, 2, 10, 11, 12], [10, 11, 12], True) for v in out.values()), out


def handles(group):
    r = group.rank()
    x, y = strided(r), torch.arange(2.0) + 10 * r
    first, second = comm.all_reduce(x, group=group, async_op=True), comm.all_gather(y, group, async_op=True)
    a, b = first.wait(), second.wait()
    return a is x, first.wait() is a, a.tolist(), b.tolist()


def test_async_verbs_return_handles_whose_wait_gives_the_result(pool):
    assert pool(2).run(handles) == [(True, True, [100, 104, 108, 112], [0, 1, 10, 11])] * 2


def test_every_verb_returns_a_tensor(pool):
    """FAULTS C19: `return dist.all_reduce(x)` gives None."""
    def verbs(group):
        x = torch.ones(2)
        outs = [comm.all_reduce(x, group=group), comm.all_gather(x, group), comm.reduce_scatter(x, group=group),
                comm.broadcast(x, 0, group)]
        outs.append(comm.send(x, 1, group) if group.rank() == 0 else comm.recv(x, 0, group))
        return [type(o) is torch.Tensor for o in outs]

    assert pool(2).run(verbs) == [[True] * 5] * 2


def overwritten(group):
    w = torch.ones(2, requires_grad=True)
    x = torch.ones(2)
    y = (w * x).sum()  # autograd keeps x for w's gradient
    comm.all_reduce(x, group=group)
    try:
        y.backward()
    except RuntimeError as error:
        return "modified by an inplace operation" in str(error)


def test_what_autograd_has_saved_is_not_overwritten_unnoticed(pool):
    assert pool(2).run(overwritten) == [True, True]


def said(fn):
    """The ValueError that `fn` raises, as text."""
    try:
        fn()
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def bad_calls(group):
    x = torch.ones(3, requires_grad=True)
    return [said(lambda: comm.all_reduce(x, group=group)), said(lambda: comm.all_reduce(x.detach(), "mean", group)),
            said(lambda: comm.reduce_scatter(torch.ones(3), group=group)),
            said(lambda: comm.reduce_scatter(torch.tensor(3.0), group=group)),
            said(lambda: comm.broadcast(torch.ones(1), 7, group))]


def test_what_cannot_be_right_is_refused_before_any_rank_waits(pool):
    for tracked, op, odd, scalar, member in pool(2).run(bad_calls):
        assert "autograd tracks" in tracked and "comm.regions" in tracked
        assert "'mean'" in op and "sum, max, min, product" in op
        assert "(3,) over 2 ranks" in odd and "()" in scalar
        assert "rank 7" in member and "[0, 1]" in member


def test_outside_ranks_the_error_names_the_launcher():
    assert "shardlab.launch" in said(lambda: comm.all_reduce(torch.ones(1)))


def disagree(group):
    r, x = group.rank(), torch.ones(4)
    with comm.use(debug=True):
        return [said(lambda: comm.all_reduce(torch.ones(4 + r), group=group)),
                said(lambda: comm.all_reduce(x.double() if r else x, group=group)),
                said(lambda: comm.all_reduce(x, "max" if r else "sum", group)),
                said(lambda: comm.broadcast(x, 0, group) if r else comm.all_reduce(x, group=group)),
                said(lambda: comm.barrier(group) if r else comm.all_gather(x, group))]


def test_debug_mode_raises_on_every_rank_where_the_ranks_disagree(pool):
    """FAULTS C8 among them: without the check, mixed dtypes abort the process."""
    for shape, dtype, op, verb, order in pool(2).run(disagree):
        assert "(4,)" in shape and "(5,)" in shape and "rank 0" in shape and "rank 1" in shape
        assert "float32" in dtype and "float64" in dtype
        assert "all_reduce(max)" in op and "all_reduce(sum)" in op
        assert "broadcast" in verb and "all_reduce" in verb
        assert "barrier" in order and "all_gather" in order


def test_the_debug_setting_ends_with_its_block():
    with pytest.raises(TypeError):
        with comm.use(debugging=True):
            pass
    from shardlab.comm.settings import now
    with comm.use(debug=True):
        assert now().debug
    assert not now().debug
