"""Single messages, alone and in batches: what arrives, in which order, and how the ledger counts them."""

import sys

import pytest
import torch
import torch.distributed as dist

from shardlab import comm

linux = pytest.mark.skipif(sys.platform != "linux", reason="memory that ranks share wants Linux")
every_way = pytest.mark.parametrize("how", [
    pytest.param({}, id="gloo"), pytest.param({"debug": True}, id="debug"),
    pytest.param({"transport": "shm"}, id="shm", marks=linux)])
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int16, torch.bool, torch.float8_e4m3fn]


def strided(rank):
    """Four values, distinct by rank and position, two apart in memory."""
    return (torch.arange(8).view(4, 2) + 100 * rank)[:, 0]


def there(group, how):
    """From rank 0 to rank 1: strided, 2-dimensional, 0-dimensional, empty, large, of every dtype; what rank 1 gets."""
    r, out = group.rank(), []
    given = [strided(0), torch.arange(6).view(2, 3) + 7, torch.tensor(5), torch.empty(0, 2), torch.arange(300_000),
             *[(torch.arange(3) % 2).to(dtype) for dtype in DTYPES]]
    with comm.use(**how):
        for tag, x in enumerate(given):
            if r == 0:
                assert comm.send(x, 1, group, tag=tag) is x
            else:
                y = torch.full((2, *x.shape), 1).to(x.dtype).movedim(0, -1)[..., 0] if tag % 2 else torch.zeros_like(x)
                out.append(comm.recv(y, 0, group, tag=tag) is y and torch.equal(x.double(), y.double()))
    return out


@every_way
def test_what_is_sent_arrives_in_the_tensor_that_is_given_for_it(pool, how):
    assert pool(2).run(there, how) == [[], [True] * (5 + len(DTYPES))]


def beside(group, how):
    r, whole = group.rank(), torch.arange(8).view(4, 2) + 1000
    with comm.use(**how):
        comm.send(strided(0), 1, group) if r == 0 else comm.recv(whole[:, 1], 0, group)
    return whole.tolist()


@every_way
def test_a_strided_tensor_is_filled_and_nothing_beside_it(pool, how):
    assert pool(2).run(beside, how)[1] == [[1000, 0], [1002, 2], [1004, 4], [1006, 6]]


def both_ways_round(group, how):
    """Each sends to both neighbours in a ring at once, and takes from both."""
    r, p = group.rank(), group.size()
    left, right = (r - 1) % p, (r + 1) % p
    of_left, of_right = torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    with comm.use(**how):
        handles = comm.batch_isend_irecv([
            comm.P2POp("isend", torch.arange(2) + 10 * r, right, group, tag=1),
            comm.P2POp("isend", torch.arange(3) + 100 * r, left, group, tag=2),
            comm.P2POp("irecv", of_left, left, group, tag=1), comm.P2POp("irecv", of_right, right, group, tag=2)])
        waited = [handle.wait() for handle in reversed(handles)]
    return [x.tolist() for x in waited], waited[1] is of_left, handles[2].wait() is of_left


@every_way
@pytest.mark.parametrize("p", [2, 3, 5])
def test_messages_of_a_batch_may_depend_on_one_another(pool, p, how):
    for r, (waited, same, again) in enumerate(pool(p).run(both_ways_round, how)):
        left, right = (r - 1) % p, (r + 1) % p
        assert waited == [[100 * right + i for i in range(3)], [10 * left, 10 * left + 1],
                          [100 * r + i for i in range(3)], [10 * r, 10 * r + 1]]
        assert same and again


def in_order(group, how):
    r, xs = group.rank(), [torch.tensor([7 * i, i]) for i in range(5)]
    with comm.use(**how):
        if r == 0:
            handles = [comm.send(x, 1, group, async_op=True, tag=3) for x in xs]
        else:
            handles = [comm.recv(torch.zeros(2, dtype=torch.int64), 0, group, async_op=True, tag=3) for _ in xs]
        return [handle.wait().tolist() for handle in reversed(handles)]


@every_way
def test_messages_arrive_in_the_order_in_which_they_were_sent(pool, how):
    assert pool(2).run(in_order, how) == [[[7 * i, i] for i in reversed(range(5))]] * 2


def waited_for(group, how):
    r, column = group.rank(), (torch.arange(8).view(4, 2) + 100)[:, 0]
    with comm.use(**how):
        if r == 0:
            handle = comm.send(strided(0), 1, group, async_op=True)  # whose contiguous copy nobody else holds
            rubbish = [torch.full((4,), 9) for _ in range(100)]
            return handle.wait().tolist(), len(rubbish)
        handle = comm.recv(column, 0, group, async_op=True)
        return handle.wait() is column, column.tolist()


@every_way
def test_a_handle_keeps_what_is_under_way(pool, how):
    """FAULTS C5."""
    assert pool(2).run(waited_for, how) == [([0, 2, 4, 6], 100), (True, [0, 2, 4, 6])]


def overwritten(group, how):
    r, w, x = group.rank(), torch.ones(2, requires_grad=True), torch.ones(2)
    y = (w * x).sum()  # autograd keeps x for w's gradient
    with comm.use(**how):
        comm.send(x, 1, group) if r == 0 else comm.recv(x, 0, group)
    try:
        y.backward()
    except RuntimeError as error:
        return "modified by an inplace operation" in str(error)


@every_way
def test_what_autograd_has_saved_is_not_received_into_unnoticed(pool, how):
    assert pool(2).run(overwritten, how) == [None, True]


def counted(group, how):
    pair, r, ledger = dist.new_group([1, 3]), group.rank(), None
    if r in (1, 3):
        with comm.use(**how), comm.record() as ledger:
            comm.send(torch.ones(5), 3, pair) if r == 1 else comm.recv(torch.ones(5), 1, pair)
            for handle in comm.batch_isend_irecv([comm.P2POp("isend", torch.ones(r), 4 - r, pair, tag=9),
                                                  comm.P2POp("irecv", torch.ones(4 - r), 4 - r, pair, tag=9)]):
                handle.wait()
        dist.destroy_process_group(pair)
    return ledger


@every_way
def test_a_message_is_counted_once_by_who_sends_it_under_the_ranks_numbers_among_all(pool, how):
    _, one, _, three = pool(4).run(counted, how)
    for r, ledger in ((1, one), (3, three)):
        rows = [(e.op, e.payload, e.wire, e.derived, [(m.src, m.dst, m.nbytes, m.offset, m.link) for m in e.messages])
                for e in ledger.entries]
        first = ("send", 20, 20, False, [(1, 3, 20, 0, "")]) if r == 1 else ("recv", 20, 0, False, [])
        assert rows == [first, ("send", 4 * r, 4 * r, False, [(r, 4 - r, 4 * r, 0, "")]),
                        ("recv", 16 - 4 * r, 0, False, [])]
        assert {(e.algorithm, e.transport, e.staged) for e in ledger.entries} == {("", how.get("transport", "gloo"),
                                                                                   False)}
        assert all(e.start <= m.start <= m.end <= e.end for e in ledger.entries for m in e.messages)
