"""Shared memory when something goes wrong half way: no later result is wrong because of it, and nothing hangs."""

import signal
import time

import pytest
import torch
import torch.distributed as dist

from shardlab import comm
from shardlab.comm import shm
from shardlab.launch import RankError, launch, ranks
from shardlab.specs import LinkSpec, Topology

pytestmark = pytest.mark.skipif(bool(shm.semaphore.MISSING), reason=shm.semaphore.MISSING or "")


def said(fn):
    try:
        return fn()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def interrupted(group):
    def late(*_):
        raise TimeoutError

    with comm.use(transport="shm"):
        if group.rank():
            time.sleep(0.6)
            return comm.all_reduce(torch.ones(2), group=group).tolist()
        signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        return [said(lambda: comm.all_reduce(torch.full((2,), 10.0), group=group)) for _ in range(2)]


def test_a_rank_that_was_torn_out_of_a_collective_is_not_let_into_the_next():
    first, again = launch(interrupted, 2, timeout=10)[0]
    assert first == "TimeoutError: "
    assert again.startswith("RuntimeError: this rank is out of step with the others in shared memory since all_reduce")


def crossed(group):
    rank, pair = dist.get_rank(), dist.new_group([0, 1])
    with comm.use(transport="shm"):
        if rank < 2:
            for _ in range(3):  # what they leave on their desks looks like what they are to meet again
                comm.all_reduce(torch.ones(2), group=pair)
        if rank == 2:
            time.sleep(0.5)
        order = [pair, group] if rank == 1 else [group, pair]
        for each in order[: 1 + (rank < 2)]:
            comm.all_reduce(torch.ones(2), group=each)


def test_an_old_note_does_not_pass_for_a_new_one():
    with pytest.raises(RankError, match="ranks disagree on the collective they enter") as raised:
        launch(crossed, 3, timeout=10)
    assert "at chunk" in str(raised.value)


def left(group):
    if group.rank() == 0:
        with comm.use(transport="shm"):
            comm.send(torch.full((3,), 666.0), 1, async_op=True)


def test_a_message_that_nobody_takes_does_not_turn_up_in_the_next_run():
    with ranks(2, timeout=10) as pool:
        with pytest.raises(RankError, match="rank 0 waits for rank 1 to take its message: wait"):
            pool.run(left)


def checked(group):
    with comm.use(transport="shm", debug=True):
        if group.rank() == 0:
            time.sleep(0.2)
            comm.send(torch.ones(4), 1, group)
            return comm.gather(torch.ones(1), 0, group).tolist()
        coming = comm.recv(torch.zeros(4), 0, group, async_op=True)
        comm.gather(torch.ones(1), 0, group)  # debug mode asks the other one first, through gloo
        return coming.wait().tolist()


def over_two_nodes(group):
    rank, x = group.rank(), torch.full((3,), float(group.rank()))
    pairs = Topology(nodes=2, per_node=2, between=LinkSpec(name="fast", per_direction=1e12))
    with comm.use(transport="shm", topology=pairs):
        if rank == 0:
            time.sleep(0.2)
            comm.send(x, 1, group)
            comm.send(x, 2, group)
        if rank == 2:
            comm.recv(torch.empty(3), 0, group)
            comm.send(x, 1, group)
        if rank == 1:
            near = comm.recv(torch.empty(3), 0, group, async_op=True)
            far = comm.recv(torch.empty(3), 2, group)  # which comes after rank 0 has been rid of what is for us
            return near.wait().tolist(), far.tolist()


def test_messages_in_memory_move_while_their_rank_waits_for_gloo():
    assert launch(checked, 2, timeout=10) == [[1.0, 1.0], [1.0] * 4]
    assert launch(over_two_nodes, 4, timeout=10)[1] == ([0.0] * 3, [2.0] * 3)


def differing(group, ways):
    with comm.use(**ways[group.rank()], debug=True):
        return said(lambda: comm.all_reduce(torch.ones(2), group=group))


@pytest.mark.parametrize("ways", [({"transport": "shm"}, {}), ({"algorithm": "ring"}, {}),
                                  ({"algorithm": "ring"}, {"algorithm": "doubling"})], ids=["shm", "ring", "doubling"])
def test_debug_mode_tells_ranks_that_go_different_ways(pool, ways):
    for each in pool(2).run(differing, ways):
        assert each.startswith("ValueError: the ranks disagree on the collective they enter")
