"""FAULTS.md C3, C5, C6, C8 and C11 through shared memory: what goes wrong is reported as on gloo, and soon."""

import os
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from processes import eventually, family

from shardlab import comm
from shardlab.launch import RankError, RankExited, RankTimeout, launch, ranks, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="unnamed semaphores between processes")
WORLD = r"on axis world, ranks \[0, 1, 2\]"


@pytest.fixture(scope="module", autouse=True)
def server():
    """The first launch imports torch; the faults are timed without it."""
    launch(lambda group: None, 1)


def failing(step, size=3, **options):
    """The error that launching `step` over shared memory raises, and the seconds until then."""
    def over_shm(group):
        with comm.use(transport="shm"):
            return step(group)

    start = time.monotonic()
    with pytest.raises(RankError) as raised:
        launch(over_shm, size, **options)
    return raised.value, time.monotonic() - start


def lines(error):
    return str(error).splitlines()


def reports(error, first=1):
    """What the report says of the ranks, from its line `first` on."""
    return [line for line in lines(error)[first:] if re.match(r"rank \d+ │", line)]


def tensor(group):
    return torch.arange(32.0).view(4, 8) + 100 * group.rank()


# C11: a rank that fails while the others wait for it


def leaving(how):
    def step(group):
        comm.all_reduce(tensor(group))
        if group.rank() == 1:
            time.sleep(0.1)  # the others wait already
            how()
        comm.all_reduce(tensor(group))

    return step


def raises():
    raise ValueError("no such expert")


@pytest.mark.parametrize(("how", "kind", "words"), [
    (raises, RankError, "raised ValueError: no such expert"),
    (lambda: sys.exit(3), RankExited, "called sys.exit(3)"),
    (lambda: os._exit(5), RankExited, "ended its process with exit code 5"),
    (lambda: os.kill(os.getpid(), signal.SIGKILL), RankExited, "was killed by SIGKILL"),
], ids=["raises", "sys.exit", "exits", "killed"])
def test_a_rank_that_fails_is_named_and_the_others_with_what_they_waited_for(how, kind, words):
    error, seconds = failing(leaving(how))
    assert type(error) is kind and error.rank == 1 and seconds < 5
    assert lines(error)[0].startswith(f"rank 1 of 3 {words}")
    assert [line[:6] for line in reports(error)] == ["rank 0", "rank 2"]
    for line in reports(error):
        assert re.search(rf"│ in all_reduce\(sum\) float32 \(4, 8\) {WORLD}, for", line)


@pytest.mark.parametrize("how", [raises, lambda: os.kill(os.getpid(), signal.SIGKILL)], ids=["raises", "killed"])
def test_a_rank_that_fails_in_the_middle_of_a_collective(how):
    def step(group):
        from shardlab.comm import shm
        added = []

        def add(into, other):
            added.append(len(into))
            if group.rank() == 1 and len(added) == 4:  # the second of several chunks
                how()
            into.add_(other)

        comm.flight.enter("all_reduce of many chunks")
        shm.here().all_reduce(torch.ones(5_000_000), add, (0, 1, 2), "large")

    error, seconds = failing(step)
    assert error.rank == 1 and seconds < 5
    assert all("in all_reduce of many chunks" in line for line in reports(error)) and len(reports(error)) == 2


def test_a_rank_that_fails_leaves_nobody_in_a_receive():
    def step(group):
        if group.rank() == 0:
            comm.recv(torch.empty(5, 2), src=1)
        if group.rank() == 2:
            comm.send(torch.empty(300, 1000), dst=1)
        time.sleep(0.1)
        os._exit(1)

    error, seconds = failing(step)
    zero, two = reports(error)
    assert type(error) is RankExited and error.rank == 1 and seconds < 5
    assert "in recv from rank 1 float32 (5, 2) on axis world" in zero
    assert "in send to rank 1 float32 (300, 1000) on axis world" in two


# C8: ranks that disagree


@pytest.mark.parametrize(("odd", "words"), [
    (lambda group: comm.all_reduce(torch.ones(4, 9)), "all_reduce(sum) float32 (4, 9)"),
    (lambda group: comm.all_reduce(tensor(group).double()), "all_reduce(sum) float64 (4, 8)"),
    (lambda group: comm.all_reduce(tensor(group), "max"), "all_reduce(max) float32 (4, 8)"),
    (lambda group: comm.broadcast(tensor(group), 0), "broadcast from rank 0 float32 (4, 8)"),
    (lambda group: comm.barrier(), "barrier"),
    (lambda group: comm.all_gather(torch.ones(2_000_000)), "all_gather float32 (2000000,)"),
], ids=["shape", "dtype", "op", "verb", "order", "length"])
def test_ranks_that_enter_different_collectives_all_say_so(odd, words):
    def step(group):
        if group.rank() == 1:
            odd(group)
        comm.all_reduce(tensor(group))
        comm.barrier()

    error, seconds = failing(step)
    assert type(error) is RankError and seconds < 5  # of any rank, whichever was the first to say so
    assert "raised ValueError: the ranks disagree on the collective they enter" in lines(error)[0]
    usual = "all_reduce(sum) float32 (4, 8) on axis world, ranks [0, 1, 2]"
    assert [line for line in error.traceback.splitlines() if line.startswith("  rank ")] == [
        f"  rank 0: {usual}", f"  rank 1: {words} on axis world, ranks [0, 1, 2]", f"  rank 2: {usual}"]
    assert all("raised ValueError: the ranks disagree" in line for line in reports(error)) and len(reports(error)) == 2


@pytest.mark.parametrize(("sent", "received", "words"), [
    (lambda: torch.ones(3), lambda: torch.empty(4), ("float32 (4,), tag 0 (16 B)", "float32 (3,), tag 0 (12 B)")),
    (lambda: torch.ones(4), lambda: torch.empty(4, dtype=torch.int32),
     ("int32 (4,), tag 0 (16 B)", "float32 (4,), tag 0 (16 B)")),
    (lambda: torch.ones(2, 3), lambda: torch.empty(3, 2),
     ("float32 (3, 2), tag 0 (24 B)", "float32 (2, 3), tag 0 (24 B)")),
], ids=["length", "dtype", "shape"])
def test_a_message_of_another_kind_is_refused_by_its_receiver(sent, received, words):
    def step(group):
        comm.send(sent(), 1) if group.rank() == 0 else comm.recv(received(), 0)

    error, seconds = failing(step, 2)
    assert error.rank == 1 and seconds < 5
    assert "rank 1 waits for {} from rank 0, which has sent {}".format(*words) in lines(error)[0]


def test_two_receives_in_the_wrong_order_are_refused():  # C6: micro-batch 1 would land as micro-batch 0
    def step(group):
        for tag in (0, 1) if group.rank() == 0 else (1, 0):
            x = torch.full((8,), float(tag))
            comm.send(x, 1, tag=tag) if group.rank() == 0 else comm.recv(x, 0, tag=tag)

    error, seconds = failing(step, 2)
    assert error.rank == 1 and seconds < 5
    assert "waits for float32 (8,), tag 1 (32 B) from rank 0, which has sent float32 (8,), tag 0" in lines(error)[0]


# C3, C15: hangs


def test_two_ranks_that_both_send_first_are_reported_at_the_time_limit():
    def step(group):
        other = 1 - group.rank()
        comm.send(torch.ones(2, 3), other)
        comm.recv(torch.empty(2, 3), other)

    error, seconds = failing(step, 2, timeout=1)
    assert type(error) is RankTimeout and 1 <= seconds < 6
    zero, one = reports(error)
    assert "comm.send(torch.ones(2, 3), other)" in zero and "comm.send(torch.ones(2, 3), other)" in one
    assert "in send to rank 1 float32 (2, 3) on axis world, ranks [0, 1], for" in zero
    assert "in send to rank 0 float32 (2, 3) on axis world, ranks [0, 1], for" in one


def test_a_collective_that_one_rank_does_not_enter_is_reported_at_the_time_limit():
    def step(group):
        if group.rank() != 1:
            comm.all_reduce(tensor(group))

    error, seconds = failing(step, timeout=1)
    assert type(error) is RankTimeout and error.rank == 0 and 1 <= seconds < 6
    zero, one, two = reports(error)
    assert "has returned" in one and re.search(rf"in all_reduce\(sum\) float32 \(4, 8\) {WORLD}", zero)
    assert re.search(rf"in all_reduce\(sum\) float32 \(4, 8\) {WORLD}", two)


def test_sends_and_receives_that_cross_are_repaired_by_starting_both():  # C3
    def step(group):
        with comm.use(transport="shm"):
            r, p = group.rank(), group.size()
            right, left = (r + 1) % p, (r - 1) % p
            whole = torch.arange(400_000.0)  # more than a channel holds
            for i in range(5):
                x, forth, back = whole + r + i, torch.empty_like(whole), torch.empty_like(whole)
                handles = comm.batch_isend_irecv([
                    comm.P2POp("isend", x, right), comm.P2POp("irecv", back, right),
                    comm.P2POp("isend", x, left), comm.P2POp("irecv", forth, left)])
                for handle in handles[:: 1 if r % 2 else -1]:
                    handle.wait()
                if not (torch.equal(forth, whole + left + i) and torch.equal(back, whole + right + i)):
                    return i

    assert launch(step, 4, timeout=20) == [None] * 4


def test_after_a_failure_fresh_ranks_have_fresh_memory():
    def half(group):
        with comm.use(transport="shm"):
            if group.rank() == 0:
                comm.send(torch.ones(200_000), 1, async_op=True)  # never taken
            comm.all_reduce(torch.ones(3)) if group.rank() else raises()

    def whole(group):
        with comm.use(transport="shm"):
            x = torch.tensor([7.0])
            comm.send(x, 1) if group.rank() == 0 else comm.recv(x.zero_(), 0)
            return comm.all_reduce(x).item()

    with ranks(2) as r:
        for _ in range(3):
            with pytest.raises(RankError, match="no such expert"):
                r.run(half)
            assert r.run(whole) == [14, 14]


# what is left behind: nothing


def traces(pid):
    """What a process has open or mapped that could be of shared memory."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return (sorted(os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()),
            [line for line in maps if line.split()[1].endswith("s")])


@pytest.mark.more
def test_two_hundred_launches_leave_nothing(tmp_path, monkeypatch):
    def step(group, n):
        with comm.use(transport="shm"):
            if n % 50 == 7 and group.rank() == 1:
                os._exit(1)  # some of them fail
            x = torch.full((40_000,), float(n))
            handle = comm.send(x, 1, async_op=True) if group.rank() == 0 else comm.recv(x.clone(), 0, async_op=True)
            comm.all_reduce(x)
            handle.wait()
            return x[0].item()

    def one(n):
        try:
            return launch(step, 2, n) == [2.0 * n] * 2
        except RankExited:
            return n % 50 == 7

    def left():
        return family(), set(os.listdir("/dev/shm")), traces(os.getpid()), traces(run._server._process.pid)

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    one(1)
    before = left()
    with ThreadPoolExecutor(4) as four:
        assert all(four.map(one, range(200)))
    assert eventually(lambda: family() == before[0])
    after = left()
    assert after[2] == before[2] and after[3] == before[3]
    assert not {name for name in after[1] - before[1] if "shardlab" in name or "torch" in name}
    assert list(tmp_path.iterdir()) == []
