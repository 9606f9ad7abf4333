"""The collectives against lists worked out by hand: values distinct by rank and position, strided, empty, of every
dtype. Each test goes by the backend's own, by messages and through shared memory.
"""

import pytest
import torch
import torch.distributed as dist

from shardlab import comm

WORLDS = [2, 3, 4]


def strided(rank, n=4, dtype=torch.float32):
    """n values, distinct by rank and position, two apart in memory (FAULTS C1, C2)."""
    return (torch.arange(2 * n).view(n, 2) + 100 * rank).to(dtype)[:, 0]


def plain(rank, n=4):
    return [100 * rank + 2 * i for i in range(n)]


def every_verb(group, way):
    r, p = group.rank(), group.size()
    with comm.use(**way):
        out = {op: comm.all_reduce(strided(r), op, group).tolist() for op in ("sum", "max", "min")}
        out["product"] = comm.all_reduce(strided(r, dtype=torch.float64), "product", group).tolist()
        out["reduce"] = comm.reduce(strided(r), p - 1, group=group).tolist()
        out["reduce_scatter"] = comm.reduce_scatter(strided(r, 2 * p), group=group).tolist()
        out["all_gather"] = comm.all_gather(strided(r), group).tolist()
        out["all_to_all"] = comm.all_to_all(strided(r, 2 * p), group=group).tolist()
        out["broadcast"] = comm.broadcast(strided(r), p - 1, group).tolist()
        out["gather"] = comm.gather(strided(r), p - 1, group).tolist()
        out["scatter"] = comm.scatter(strided(r), strided(7, 4 * p) if r == 1 else None, 1, group).tolist()
        out["barrier"] = comm.barrier(group)
    return out


@pytest.mark.parametrize("p", WORLDS)
def test_strided_tensors_give_the_values_of_contiguous_ones(pool, p, way):
    columns, last = list(zip(*map(plain, range(p)), strict=True)), p - 1
    for r, out in enumerate(pool(p).run(every_verb, way)):
        assert out["sum"] == [sum(c) for c in columns]
        assert out["max"] == plain(last) and out["min"] == plain(0)
        assert out["product"] == [float(torch.tensor(c, dtype=torch.float64).prod()) for c in columns]
        assert out["reduce"] == ([sum(c) for c in columns] if r == last else plain(r))
        assert out["reduce_scatter"] == [p * x + 100 * sum(range(p)) for x in (4 * r, 4 * r + 2)]
        assert out["all_gather"] == [x for q in range(p) for x in plain(q)]
        assert out["all_to_all"] == [x for q in range(p) for x in plain(q, 2 * p)[2 * r : 2 * r + 2]]
        assert out["broadcast"] == plain(last)
        assert out["gather"] == ([x for q in range(p) for x in plain(q)] if r == last else [])
        assert out["scatter"] == plain(7, 4 * p)[4 * r : 4 * r + 4]
        assert out["barrier"] is None


def in_place(group, way):
    r, p = group.rank(), group.size()
    out = []
    for verb in (lambda x: comm.all_reduce(x, group=group), lambda x: comm.broadcast(x, 1, group),
                 lambda x: comm.reduce(x, 1, group=group),
                 lambda x: comm.scatter(x, torch.arange(4.0 * p) + 50 if r == 0 else None, 0, group)):
        whole = torch.arange(8.0).view(4, 2) + 100 * r
        column = whole[:, 1]
        with comm.use(**way):
            out.append((verb(column) is column, whole.tolist()))
    return out


def test_an_in_place_verb_writes_its_strided_argument_and_nothing_beside_it(pool, way):
    for r, results in enumerate(pool(2).run(in_place, way)):
        own = [100 * r + x for x in (1, 3, 5, 7)]
        columns = [[102, 106, 110, 114], [101, 103, 105, 107], [102, 106, 110, 114] if r == 1 else own,
                   [50 + 4 * r + i for i in range(4)]]
        for (same, whole), column in zip(results, columns, strict=True):
            assert same and whole == [[2 * i + 100 * r, column[i]] for i in range(4)]


ROWS = [[0, 1, 2], [1, 2, 0], [2, 0, 1]]  # how many rows rank r has for rank q


def uneven(group, way):
    r = group.rank()
    rows = (torch.arange(12).view(3, 4) + 100 * r)[:, ::2]
    with comm.use(**way):
        out = comm.all_to_all(rows, ROWS[r], [row[r] for row in ROWS], group)
        none = comm.all_to_all(rows[:0], [0] * 3, [0] * 3, group)
    return out.tolist(), tuple(none.shape)


def test_rows_in_uneven_and_empty_blocks_go_to_their_ranks(pool, way):
    assert pool(3).run(uneven, way) == [([[100, 102], [200, 202], [204, 206]], (0, 2)),
                                        ([[0, 2], [104, 106], [108, 110]], (0, 2)),
                                        ([[4, 6], [8, 10], [208, 210]], (0, 2))]


def shapes(group, way):
    r, p = group.rank(), group.size()
    number, numbers, empty = torch.tensor(100 * r + 1), torch.arange(p) + 50, torch.empty(0, 3)
    with comm.use(**way, debug=True):
        zero = [comm.all_reduce(number.clone(), group=group), comm.reduce(number.clone(), 0, group=group),
                comm.broadcast(number.clone(), 1, group), comm.all_gather(number, group),
                comm.gather(number, 0, group), comm.scatter(number.clone(), numbers if r == 1 else None, 1, group)]
        none = [comm.all_reduce(empty.clone(), group=group), comm.reduce(empty.clone(), 0, group=group),
                comm.broadcast(empty.clone(), 1, group), comm.all_gather(empty, group), comm.gather(empty, 0, group),
                comm.scatter(empty.clone(), empty.clone() if r == 1 else None, 1, group),
                comm.reduce_scatter(torch.empty(p, 0), group=group), comm.all_to_all(torch.empty(p, 0), group=group)]
    return [x.tolist() for x in zero], [tuple(x.shape) for x in none]


@pytest.mark.parametrize("p", WORLDS)
def test_empty_and_zero_dimensional_tensors(pool, p, way):
    own, total = [100 * r + 1 for r in range(p)], 100 * sum(range(p)) + p
    for r, (zero, none) in enumerate(pool(p).run(shapes, way)):
        assert zero == [total, own[r] if r else total, 101, own, [] if r else own, 50 + r]
        assert none == [(0, 3)] * 6 + [(1, 0), (p, 0)]


def added(group, way, dtypes):
    out = {}
    for dtype in dtypes:
        x = torch.arange(4).to(dtype) + 10 * group.rank()
        with comm.use(**way):
            got = [comm.all_reduce(x.clone(), group=group), comm.reduce(x.clone(), 0, group=group),
                   comm.reduce_scatter(x, group=group)]
        out[str(dtype)] = [x.tolist() for x in got], [x.dtype == dtype for x in got]
    return out


ADDS = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8]


def test_each_dtype_that_adds(pool, way):
    dtypes = ADDS if way == {} else [*ADDS, torch.int16]  # which gloo refuses
    for r, out in enumerate(pool(2).run(added, way, dtypes)):
        mine = [[10, 12, 14, 16], [10, 11, 12, 13] if r else [10, 12, 14, 16], [14, 16] if r else [10, 12]]
        assert all(v == (mine, [True] * 3) for v in out.values()), out
        assert len(out) == len(dtypes)


def moved(group, way):
    r, out = group.rank(), {}
    for dtype in [*ADDS, torch.int16, torch.uint16, torch.float8_e4m3fn, torch.complex64]:
        x, whole = (torch.arange(2) + 10 * r).to(dtype), (torch.arange(4) + 6).to(dtype)
        with comm.use(**way):
            got = [comm.all_gather(x, group), comm.broadcast(x.clone(), 1, group), comm.all_to_all(x, group=group),
                   comm.gather(x, 0, group), comm.scatter(x.clone(), whole if r == 1 else None, 1, group)]
        out[str(dtype)] = [x.to(torch.complex64).real.tolist() for x in got], [x.dtype == dtype for x in got]
    return out


def test_each_dtype_moves_also_those_that_do_not_add(pool, way):
    for r, out in enumerate(pool(2).run(moved, way)):
        mine = [[0, 1, 10, 11], [10, 11], [1, 11] if r else [0, 10], [] if r else [0, 1, 10, 11],
                [8, 9] if r else [6, 7]]
        assert all(v == (mine, [True] * 5) for v in out.values()), out


def flags(group, way):
    x = torch.tensor([[False, False, True, True], [False, True, False, True]][group.rank()])
    with comm.use(**way):
        got = [*(comm.all_reduce(x.clone(), op, group) for op in ("sum", "max", "product", "min")),
               comm.reduce(x.clone(), 1, "sum", group), comm.reduce_scatter(x, "product", group),
               comm.all_gather(x, group)]
    return [x.view(torch.uint8).tolist() for x in got], [x.dtype == torch.bool for x in got]


def test_of_bools_the_sum_is_any_and_the_product_all(pool, way):
    """In memory a bool is 0 or 1: a 2 would pass for true, and count as two."""
    zero, one, some, every = [0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 1], [0, 0, 0, 1]
    for r, (got, bools) in enumerate(pool(2).run(flags, way)):
        assert got[:4] == [some, some, every, every] and all(bools)
        assert got[4:] == [some if r else zero, every[2:] if r else every[:2], zero + one]


def handles(group, way):
    r = group.rank()
    x, y, z, how = strided(r), torch.arange(2.0) + 10 * r, torch.arange(2.0) + 20, {"group": group, "async_op": True}
    with comm.use(**way):
        started = [comm.all_reduce(x, **how), comm.reduce(y.clone(), 1, **how), comm.reduce_scatter(y, **how),
                   comm.all_gather(y, **how), comm.all_to_all(y, **how), comm.broadcast(y.clone(), 1, **how),
                   comm.gather(y, 0, **how), comm.scatter(y[:1].clone(), z if r == 0 else None, 0, **how)]
    results = [handle.wait() for handle in started]
    again = all(handle.wait() is result for handle, result in zip(started, results, strict=True))
    return results[0] is x, again, {type(handle) for handle in started} == {comm.Handle}, [x.tolist() for x in results]


def test_async_verbs_return_handles_whose_wait_gives_the_result_each_time(pool, way):
    for r, out in enumerate(pool(2).run(handles, way)):
        assert out == (True, True, True, [
            [100, 104, 108, 112], [10, 12] if r else [0, 1], [12] if r else [10], [0, 1, 10, 11],
            [1, 11] if r else [0, 10], [10, 11], [] if r else [0, 1, 10, 11], [21] if r else [20]])


def test_every_verb_returns_a_tensor(pool, way):
    """FAULTS C19: `return dist.all_reduce(x)` gives None."""
    def verbs(group):
        x, r = torch.ones(2), group.rank()
        with comm.use(**way):
            outs = [comm.all_reduce(x, group=group), comm.reduce(x, 0, group=group), comm.all_gather(x, group),
                    comm.reduce_scatter(x, group=group), comm.all_to_all(x, group=group), comm.broadcast(x, 0, group),
                    comm.gather(x, 0, group), comm.scatter(x, torch.ones(4) if r else None, 1, group),
                    comm.recv(x, 0, group) if r else comm.send(x, 1, group)]
        return [type(o) is torch.Tensor for o in outs]

    assert pool(2).run(verbs) == [[True] * 9] * 2


def some_of_four(group, way):
    """Ranks 1 and 3 as a group: `src` and `dst` are numbers among all four ranks."""
    pair, r = dist.new_group([1, 3]), group.rank()
    out = []
    if r in (1, 3):
        x = torch.arange(2) + 10 * r
        with comm.use(**way):
            out = [comm.all_reduce(x.clone(), group=pair), comm.reduce(x.clone(), 3, group=pair),
                   comm.reduce_scatter(x, group=pair), comm.all_gather(x, pair), comm.all_to_all(x, group=pair),
                   comm.broadcast(x.clone(), 3, pair), comm.gather(x, 1, pair),
                   comm.scatter(x.clone(), torch.arange(4) if r == 3 else None, 3, pair),
                   comm.recv(x.clone(), 1, pair) if r == 3 else comm.send(x, 3, pair)]
        dist.destroy_process_group(pair)
    return [x.tolist() for x in out]


def test_in_a_group_of_some_ranks_roots_are_named_by_their_number_among_all(pool, way):
    zero, one, two, three = pool(4).run(some_of_four, way)
    assert zero == two == []
    assert one == [[40, 42], [10, 11], [40], [10, 11, 30, 31], [10, 30], [30, 31], [10, 11, 30, 31], [0, 1], [10, 11]]
    assert three == [[40, 42], [40, 42], [42], [10, 11, 30, 31], [11, 31], [30, 31], [], [2, 3], [10, 11]]


def overwritten(group, way):
    out, r = [], group.rank()

    def exchange(x):
        ops = [comm.P2POp("isend", torch.ones(2), 1 - r, group), comm.P2POp("irecv", x, 1 - r, group)]
        return [handle.wait() for handle in comm.batch_isend_irecv(ops)]

    for verb in (lambda x: comm.all_reduce(x, group=group), lambda x: comm.broadcast(x, 0, group),
                 lambda x: comm.scatter(x, torch.ones(4) if r else None, 1, group),
                 exchange):
        w, x = torch.ones(2, requires_grad=True), torch.ones(2)
        y = (w * x).sum()  # autograd keeps x for w's gradient
        with comm.use(**way):
            verb(x)
        try:
            y.backward()
        except RuntimeError as error:
            out.append("modified by an inplace operation" in str(error))
    return out


def test_what_autograd_has_saved_is_not_overwritten_unnoticed(pool, way):
    assert pool(2).run(overwritten, way) == [[True] * 4] * 2


def marked(group, way):
    x = torch.ones(2 * group.size())
    with comm.use(**way), comm.record() as ledger:
        comm.all_reduce(x, group=group)
        comm.all_gather(x, group)
        comm.reduce_scatter(x, group=group)
        comm.broadcast(x, 0, group)
        comm.barrier(group)
        comm.reduce(x, 0, group=group)
        comm.gather(x, 0, group)
        comm.all_to_all(x, group=group)
        comm.scatter(x[:2], x if group.rank() == 1 else None, 1, group)
    return [(e.algorithm, e.transport, e.staged) for e in ledger.entries]


def test_the_ledger_says_which_way_each_went(pool, way):
    if way == {}:
        went = [("", "gloo", False)] * 9
    else:
        transport = way.get("transport", "gloo")
        first = ["shared"] * 5 if transport == "shm" else ["ring", "ring", "ring", "tree", "doubling"]
        went = [(name, transport, False) for name in [*first, "tree", "naive", "pairwise", "naive"]]
    assert pool(3).run(marked, way) == [went] * 3
