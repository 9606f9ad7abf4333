"""Shared memory between the ranks of a host: what arrives, in which order, who is told of what, and what it leaves."""

import itertools
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import pytest
import torch

from shardlab import comm
from shardlab.card import resident
from shardlab.comm import shm
from shardlab.comm.shm import channels, desks, direct, segment, semaphore, waiting
from shardlab.launch import launch, ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="unnamed semaphores between processes")
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)


def add(into, other):
    into.add_(other)


def values(rank, n, dtype=torch.int64):
    """n whole numbers, distinct by rank and position as far as 0 to 28 go: 8 ranks' sums fit in bf16 and uint8."""
    return ((torch.arange(n) * 7 + 3 * rank) % 29).to(dtype)


# collectives


def everything(group, numbers, dtypes=DTYPES, desk=None, small=None):
    """What went wrong in all verbs over lengths and dtypes; `desk`, `small`: bytes of a slot, of the short way."""
    here, p, r = shm.here(), group.size(), group.rank()
    everyone, wrong = tuple(range(p)), []
    before = here._direct._desks.size, direct.SMALL
    here._direct._desks.size, direct.SMALL = desk or before[0], small or before[1]
    for n, dtype in itertools.product(numbers, dtypes):
        all_of = [values(q, n, dtype) for q in range(p)]
        total = sum(values(q, n) for q in range(p)).to(dtype)

        def check(verb, got, expected, written, nbytes, about=(n, dtype)):
            if not torch.equal(got, expected) or written != nbytes:
                wrong.append((verb, *about, written, nbytes))

        size = n * dtype.itemsize
        x = values(r, n, dtype)
        check("all_reduce", x, total, here.all_reduce(x, add, everyone, "reduce"), size if p > 1 else 0)
        x, out = values(r, n, dtype), torch.empty(p * n, dtype=dtype)
        check("all_gather", out, torch.cat(all_of), here.all_gather(out, x, everyone, "gather"), size if p > 1 else 0)
        x, out = values(r, p * n, dtype), torch.empty(n, dtype=dtype)
        whole = sum(values(q, p * n) for q in range(p)).to(dtype)
        check("reduce_scatter", out, whole[r * n : (r + 1) * n],
              here.reduce_scatter(out, x, add, everyone, "scatter"), (p - 1) * size)
        x, src = values(r, n, dtype), p // 2
        check("broadcast", x, all_of[src], here.broadcast(x, src, everyone, "cast"), size * (r == src and p > 1))
        here.barrier(everyone, "barrier")
    here._direct._desks.size, direct.SMALL = before
    return wrong


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8])
def test_collectives_equal_their_definition(pool, p):
    numbers = sorted({0, 1, p - 1, p, p + 1, 100, direct.SMALL // 4, direct.SMALL // 4 + 1, 30_011})
    assert pool(p).run(everything, numbers) == [[]] * p


@pytest.mark.parametrize("p", [2, 3, 4, 7])
def test_collectives_of_many_chunks_equal_their_definition(pool, p):
    desk, small = 2**12, 2**9
    edges = [k * desk // 4 + d for k in (1, 2, 3) for d in (-1, 0, 1)]  # of a slot of float32
    numbers = sorted({small // 4, small // 4 + 1, 255, *edges, 5 * desk // 4 + 77})
    assert pool(p).run(everything, numbers, desk=desk, small=small) == [[]] * p


def test_a_tensor_larger_than_a_desk(pool):
    assert pool(3).run(everything, [segment.LARGEST_SLOT // 4 + 1], [torch.float32]) == [[]] * 3


def test_expected_lists_by_hand(pool):
    def step(group):
        here, r = shm.here(), group.rank()
        x = torch.tensor([1, 20, 300]) * (r + 1)
        here.all_reduce(x, add, (0, 1, 2), "reduce")
        gathered, scattered = torch.empty(6, dtype=torch.int64), torch.empty(1, dtype=torch.int64)
        here.all_gather(gathered, torch.tensor([r, 10 * r]), (0, 1, 2), "gather")
        here.reduce_scatter(scattered, torch.tensor([1, 20, 300]) * (r + 1), add, (0, 1, 2), "scatter")
        zero = torch.tensor(r + 7)
        here.broadcast(zero, 2, (0, 1, 2), "cast")
        greatest = torch.tensor([r, -r])
        here.all_reduce(greatest, lambda into, other: torch.maximum(into, other, out=into), (0, 1, 2), "max")
        return x.tolist(), gathered.tolist(), scattered.tolist(), zero.item(), greatest.tolist()

    both = [6, 120, 1800], [0, 0, 1, 10, 2, 20]
    assert pool(3).run(step) == [(*both, [total], 9, [2, 0]) for total in both[0]]


def test_sums_are_formed_in_the_order_of_the_ranks_whatever_the_length(pool):
    def step(group, n):
        parts = [torch.randn(n, generator=torch.Generator().manual_seed(q)) for q in range(group.size())]
        expected = parts[0].clone()
        for part in parts[1:]:
            expected += part
        x, everyone = parts[group.rank()].clone(), tuple(range(group.size()))
        shm.here().all_reduce(x, add, everyone, "reduce")
        m = n // group.size()
        out = torch.empty(m)
        shm.here().reduce_scatter(out, parts[group.rank()][: m * group.size()], add, everyone, "scatter")
        return torch.equal(x, expected), torch.equal(out, expected[m * group.rank() : m * (group.rank() + 1)])

    for n in (1000, 100_001):
        assert pool(4).run(step, n) == [(True, True)] * 4


@pytest.mark.parametrize("desk", [None, 2**12])
def test_ranks_in_several_groups_do_not_disturb_each_other(pool, desk):
    def step(group):
        here, r, dice, late = shm.here(), group.rank(), random.Random(5), random.Random(group.rank())
        groups, wrong = [(0, 1), (2, 3), (0, 2), (1, 3), (3, 1, 0), (0, 1, 2, 3), (1, 2)], []
        before = here._direct._desks.size, direct.SMALL
        here._direct._desks.size, direct.SMALL = desk or before[0], min(desk or before[1], before[1])

        def late_add(into, other):
            if late.random() < 0.05:  # while the others go on
                time.sleep(late.random() * 0.003)
            into.add_(other)

        for i in range(200):
            members, n, again = dice.choice(groups), dice.choice([0, 3, 500, 9000]), dice.random() < 0.5
            if r not in members:
                continue
            x = values(r + i, n)
            here.all_reduce(x, late_add, members, f"{i}")
            if not torch.equal(x, sum(values(q + i, n) for q in members)):
                wrong.append((i, members, n))
            out = torch.empty(n * len(members), dtype=torch.int64)
            here.all_gather(out, values(r + i, n), members, f"{i} too")
            if not torch.equal(out, torch.cat([values(q + i, n) for q in members])):
                wrong.append((i, members, n, "gather"))
            if again:  # or all groups would always be at the same slot
                here.barrier(members, f"{i} again")
        here._direct._desks.size, direct.SMALL = before
        return wrong

    assert pool(4).run(step) == [[]] * 4


def test_ranks_that_enter_different_collectives_are_all_told_and_go_on(pool):
    def step(group):
        here, r, said = shm.here(), group.rank(), []
        for i in range(5):
            try:
                if r == 1:
                    here.barrier((0, 1, 2), f"barrier {i}")
                else:
                    here.all_reduce(torch.ones(200_000), add, (0, 1, 2), f"all_reduce {i}")
            except ValueError as error:
                said.append(str(error))
            x = torch.tensor([r + 1])
            here.all_reduce(x, add, (0, 1, 2), f"between {i}")
            said.append(x.item())
        return said

    words = "the ranks disagree on the collective they enter:\n" + "\n".join(
        f"  rank {r}: {{}} {{i}}" for r in range(3))
    expected = [item for i in range(5) for item in (
        words.replace("{i}", str(i)).format("all_reduce", "barrier", "all_reduce"), 6)]
    assert pool(3).run(step) == [expected] * 3


# messages


@pytest.mark.parametrize("n", [
    0, 1, 1000, segment.LARGEST_CHUNK // 8, (2 * segment.CHANNEL_SLOTS + 1) * segment.LARGEST_CHUNK // 8 + 3])
def test_two_ranks_that_start_both_and_then_wait_exchange(pool, n):
    def step(group):
        other = 1 - group.rank()
        sent = shm.here().isend(values(group.rank(), n), other, "there")
        x = torch.full((n,), -1)
        got = shm.here().irecv(x, other, "there")
        for pending in (sent, got) if group.rank() else (got, sent):
            pending.wait()
        return torch.equal(x, values(other, n))

    assert pool(2).run(step) == [True, True]


def test_messages_of_a_pair_come_in_the_order_sent_and_are_waited_for_in_any(pool):
    def step(group):
        here, sizes = shm.here(), [3, 0, 300_000, 1, 70_000, 0, 5]
        if group.rank() == 0:
            pending = [here.isend(values(i, n), 1, f"number {i}") for i, n in enumerate(sizes)]
        else:
            xs = [torch.full((n,), -1) for n in sizes]
            pending = [here.irecv(x, 0, f"number {i}") for i, x in enumerate(xs)]
        for one in reversed(pending):
            one.wait()
        return group.rank() == 0 or [torch.equal(x, values(i, n)) for i, (x, n) in
                                     enumerate(zip(xs, sizes, strict=True))]

    assert pool(2).run(step)[1] == [True] * 7


def test_a_send_is_done_when_it_has_been_taken(pool):
    def step(group):
        start = time.monotonic()
        if group.rank() == 0:
            shm.here().isend(torch.ones(2), 1, "m").wait()
            return time.monotonic() - start
        time.sleep(0.3)
        shm.here().irecv(torch.empty(2), 0, "m").wait()

    assert pool(2).run(step)[0] > 0.2


def test_messages_move_while_their_rank_waits_for_something_else(pool):
    def step(group):
        here, r, n = shm.here(), group.rank(), 400_000
        if r == 0:
            large = here.isend(values(0, n), 1, "large")  # far more than a channel holds
            here.barrier((0, 1, 2), "barrier")  # rank 1 comes when it has all of it
            small = torch.empty(1, dtype=torch.int64)
            here.irecv(small, 2, "small").wait()
            large.wait()
            return small.item()
        if r == 1:
            x = torch.empty(n, dtype=torch.int64)
            here.irecv(x, 0, "large").wait()
            here.barrier((0, 1, 2), "barrier")
            return torch.equal(x, values(0, n))
        here.barrier((0, 1, 2), "barrier")
        return here.isend(torch.tensor([7]), 0, "small").wait()

    assert pool(3).run(step) == [7, True, None]


def test_nobody_sleeps_through_a_message(pool):
    """With no looking before it sleeps, and a sleep that only a ring ends, one lost ring would hang."""
    def step(group):
        here, r, p, dice = shm.here(), group.rank(), group.size(), random.Random(3)
        before, waiting.LOOKING, waiting.SLICE = (waiting.LOOKING, waiting.SLICE), 0.0, 60.0
        try:
            for i in range(150):
                sizes = [[dice.choice([0, 5, 40_000, 200_000]) for _ in range(p)] for _ in range(p)]
                sent = [here.isend(values(r + i, sizes[r][q]), q, f"{i}") for q in range(p) if q != r]
                xs = {q: torch.empty(sizes[q][r], dtype=torch.int64) for q in range(p) if q != r}
                got = [here.irecv(x, q, f"{i}") for q, x in xs.items()]
                if i % 3 == 0:
                    here.barrier(tuple(range(p)), f"between {i}")
                for pending in random.Random(r).sample(sent + got, len(sent + got)):
                    pending.wait()
                if any(not torch.equal(x, values(q + i, len(x))) for q, x in xs.items()):
                    return i
        finally:
            waiting.LOOKING, waiting.SLICE = before

    with ranks(4, timeout=30) as r:
        assert r.run(step) == [None] * 4


def test_a_ring_taken_along_with_another_is_not_slept_through(monkeypatch):
    """A message comes after it was looked for, and its ring goes with one that had come before."""
    memory = shm.Segment.anonymous(2)
    waits = waiting.Waiting(0, memory.bells, limit=60)
    early, late = memory.meet(1, 0), memory.meet(0, 1)
    monkeypatch.setattr(waiting, "LOOKING", 0.0)
    monkeypatch.setattr(waiting, "SLICE", 3.0)

    class End:
        looks = taken = 0

        def advance(self):
            self.looks += 1
            self.taken += waits.take(late)
            if self.looks == 1:
                early.post()  # of which the ring has woken this rank
                waits.post(late, 0)
                assert waits.take(early)

    end = End()
    waits.moving[end] = None
    start = time.monotonic()
    waits.until(lambda: end.taken == 1, "late")
    assert time.monotonic() - start < 2 and not memory.bells[0].take()


def test_a_message_that_is_not_the_one_expected_is_named_and_the_next_ones_come(pool):
    def step(group):
        here, n, said = shm.here(), 200_000, []
        if group.rank() == 0:
            for text, x in (("tag 1", values(1, n)), ("tag 2", values(2, 3)), ("tag 3", values(3, 5))):
                here.isend(x, 1, text).wait()
            return
        for text, m in (("tag 2", 3), ("tag 2", 4), ("tag 3", 5)):
            x = torch.full((m,), -1)
            try:
                here.irecv(x, 0, text).wait()
            except ValueError as error:
                said.append(str(error))
        return said, x.tolist()

    said, last = pool(2).run(step)[1]
    assert said == [f"rank 1 waits for tag 2 ({m} B) from rank 0, which has sent {sent} B): "
                    "both must send and receive in the same order"
                    for m, sent in ((24, "tag 1 (1,600,000"), (32, "tag 2 (24"))]
    assert last == values(3, 5).tolist()


def test_a_tensor_that_is_sent_may_be_dropped_and_its_handle_too(pool):
    def step(group):
        if group.rank() == 0:
            x = values(0, 500_000)
            alive = weakref.ref(x)
            shm.here().isend(x, 1, "m")
            del x
            before = alive() is not None
            shm.here().barrier((0, 1), "barrier")  # rank 1 comes when it has all of it
            return before, alive() is None
        x = torch.empty(500_000, dtype=torch.int64)
        shm.here().irecv(x, 0, "m").wait()
        shm.here().barrier((0, 1), "barrier")
        return torch.equal(x, values(0, 500_000))

    assert pool(2).run(step) == [(True, True), True]


# waits


@pytest.fixture
def two():
    """Two ranks' ends of one segment, in one process."""
    memory = shm.Segment.anonymous(2)
    return shm.Shared(memory, 0, 0.3), shm.Shared(memory, 1, 0.3)


@pytest.mark.parametrize(("wait", "words"), [
    (lambda here: here.barrier((0, 1), "barrier on axis tp"), "waited 0.3 s for rank 1 in barrier on axis tp"),
    (lambda here: here.isend(torch.ones(3), 1, "float32 (3,)").wait(), "waited 0.3 s for rank 1 to take float32 (3,)"),
    (lambda here: here.irecv(torch.ones(3), 1, "float32 (3,)").wait(), "waited 0.3 s for rank 1 to send float32 (3,)"),
])
def test_a_wait_that_outlasts_its_limit_says_what_for(two, monkeypatch, wait, words):
    monkeypatch.setattr(waiting, "SLICE", 0.05)
    start = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        wait(two[0])
    assert str(raised.value) == words and 0.3 <= time.monotonic() - start < 2


def test_a_rank_that_waits_sleeps(two):
    monotonic, used = time.monotonic(), time.thread_time()
    with pytest.raises(RuntimeError):
        two[0].barrier((0, 1), "barrier")
    assert time.thread_time() - used < 0.1 < 0.3 <= time.monotonic() - monotonic


def test_a_post_wakes_who_sleeps():
    memory = shm.Segment.anonymous(2)
    bell = memory.bells[1]
    assert not bell.take() and not bell.take_within(0.01)
    bell.post()
    bell.post()
    assert bell.take() and bell.take() and not bell.take()
    threading.Timer(0.1, bell.post).start()
    start = time.monotonic()
    assert bell.take_within(5) and time.monotonic() - start < 2


# where there is some, and where there is none


@pytest.mark.parametrize("p", [1, 2, 7, 16, shm.MOST])
def test_a_segment_is_divided_without_overlap_up_to_the_most_ranks(p):
    memory = shm.Segment.anonymous(p)
    pairs = list(itertools.product(range(p), repeat=2))
    lines = [memory.channel(*pair) for pair in pairs]
    semaphores = {s._at.value for s in [*memory.bells, *(memory.meet(*pair) for pair in pairs),
                                        *(s for desk in memory.desks for s in desk.read),
                                        *(s for line in lines for s in (line.full, line.free))]}
    assert len(semaphores) == p + desks.SLOTS * p + 3 * p**2
    assert semaphores == set(memory._semaphores)  # all are set up
    spans = [(at, at + semaphore.SIZE) for at in semaphores]
    spans += [(at, at + desk.size + desks.NOTE) for desk in memory.desks for at in desk.slots]
    spans += [(at, at + channels.NOTE + line.size) for line in lines for at in line.slots]
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert spans[-1][1] - spans[0][0] <= segment.SIZE <= 64 * 10**6
    assert min(desk.size for desk in memory.desks) >= direct.SMALL  # the short way takes one slot
    assert lines[0].size >= 2**10


def test_ranks_that_share_no_memory_are_told_why(monkeypatch):
    with pytest.raises(ValueError, match="no rank that launch has started"):
        shm.here()
    assert shm.attempt(shm.Segment.anonymous, 33) == (None, "it is for up to 32 ranks of a host, not for 33")

    def refuse(ranks):
        raise OSError(12, "Cannot allocate memory")

    assert shm.attempt(refuse, 2)[1] == "the system refuses it: [Errno 12] Cannot allocate memory"
    monkeypatch.setattr(semaphore, "MISSING", "darwin has no unnamed POSIX semaphores")
    monkeypatch.setattr(shm, "_missing", "")  # put back afterwards
    shm.join(0, 1.0, *shm.attempt(shm.Segment.anonymous, 2))
    with pytest.raises(ValueError) as raised:
        shm.here()
    assert str(raised.value) == ("no shared memory between ranks here: darwin has no unnamed POSIX semaphores. "
                                 "Use the backend: comm.use(transport='backend')")


def test_it_does_not_count_against_a_card():
    def step(group):
        x = torch.ones(2**20)  # 4 MiB
        for _ in range(3):
            shm.here().all_reduce(x, add, (0, 1), "reduce")
        held = resident()
        return x[0].item(), held.used - held.tensors, [g for g in held.groups if g.nbytes > x.nbytes]

    for first, rest, larger in launch(step, 2, card="8 MiB"):
        assert first == 8 and rest < 3 * 2**20 and larger == []


def test_under_torchrun_the_processes_share_memory_without_a_name(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent("""
        import os, torch
        from shardlab import comm
        from shardlab.launch import launch
        def total(group):
            with comm.use(transport="shm"):
                x = comm.all_reduce(torch.tensor([1.0, 20.0]) * (group.rank() + 1))
            mapped = [line.split()[-1] for line in open("/proc/self/maps") if "memfd:shardlab-shm" in line]
            return x.tolist(), mapped
        print(f"{launch(total, 2) + launch(total, 2)}\\n", end="")
    """))
    before = set(os.listdir("/dev/shm"))
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                           str(script)], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [str([([3.0, 60.0], ["(deleted)"])] * 4)] * 2, done.stderr
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "shardlab" in name}


def test_the_verbs_use_it_when_asked(pool):
    def step(group):
        with comm.record() as ledger, comm.use(transport="shm"):
            x = comm.all_reduce(torch.arange(6.0).view(2, 3).t() + group.rank())  # strided
            flags = comm.all_reduce(torch.tensor([group.rank() == 0, False]))
            comm.barrier()
        return x.tolist(), flags.tolist(), [(e.algorithm, e.transport, e.wire, e.derived) for e in ledger.entries]

    entries = [("shared", "shm", 24, False), ("shared", "shm", 2, False), ("shared", "shm", 0, False)]
    assert pool(2).run(step) == [([[1.0, 7.0], [3.0, 9.0], [5.0, 11.0]], [True, False], entries)] * 2
