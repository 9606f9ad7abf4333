"""FAULTS.md C1–C6, C8, C11 and C16 for the verbs, by every way that they go.

Ranks that fail or differ within a collective end with a report that names who, in what, with whom and which shape;
what would be silently wrong is found in debug mode, and through shared memory always.
"""

import gc
import os
import re
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

from shardlab import comm
from shardlab.comm import backend, made
from shardlab.comm.algorithms import TABLE
from shardlab.launch import RankError, RankExited, RankTimeout, launch
from shardlab.specs import LinkSpec, Topology

linux = pytest.mark.skipif(sys.platform != "linux", reason="memory that ranks share wants Linux")
shm = pytest.param({"transport": "shm"}, id="shm", marks=linux)
gloo, debug = pytest.param({}, id="gloo"), pytest.param({"debug": True}, id="debug")
WORLD = "on axis world, ranks [0, 1, 2]"


@pytest.fixture(scope="module", autouse=True)
def server():
    """The first launch imports torch; the faults are timed without it."""
    launch(lambda group: None, 1)


def failing(step, size=3, timeout=30, **how):
    """The error that launching `step` raises, where it goes by `comm.use(**how)`. It may not take 20 s."""
    def run(group):
        with comm.use(**how):
            return step(group)

    start = time.monotonic()
    with pytest.raises(RankError) as raised:
        launch(run, size, timeout=timeout)
    assert time.monotonic() - start < 20
    return raised.value


def others(error):
    """What the report says of each rank that did not fail first."""
    return {int(line[5]): line for line in str(error).splitlines() if re.match(r"rank \d │", line)}


def tensor(group, dtype=torch.float32):
    return (torch.arange(32).view(4, 8) + 100 * group.rank()).to(dtype)


def said(fn):
    """The ValueError that `fn` raises, as text."""
    try:
        fn()
    except ValueError as error:
        return str(error)
    return ""


# C3, C4: messages that wait for each other


@pytest.mark.parametrize("how", [gloo, shm])
def test_two_ranks_that_both_send_first_are_shown_in_their_sends_and_a_batch_repairs_it(pool, how):
    def swap(group):
        comm.send(tensor(group), 1 - group.rank(), group, tag=3)
        return comm.recv(torch.empty(4, 8), 1 - group.rank(), group, tag=3)

    error = failing(swap, 2, timeout=1, **how)
    assert type(error) is RankTimeout
    for rank, line in others(error).items():
        assert f"in send to rank {1 - rank}, tag 3 float32 (4, 8) on axis world, ranks [0, 1], for " in line
    assert len(others(error)) == 2 and "comm.batch_isend_irecv" in str(error)

    def repaired(group):
        got, other = torch.empty(4, 8), 1 - group.rank()
        with comm.use(**how):
            for handle in comm.batch_isend_irecv([comm.P2POp("isend", tensor(group), other, group, 3),
                                                  comm.P2POp("irecv", got, other, group, 3)]):
                handle.wait()
        return got[0, 0].item()

    assert pool(2).run(repaired) == [100, 0]


@pytest.mark.parametrize("how", [gloo, debug, shm])
def test_a_rank_may_talk_both_ways_at_once_while_one_of_them_is_late(pool, how):
    def step(group):
        r, got = group.rank(), [torch.empty(4, 8) for _ in range(3)]
        if r == 0:
            time.sleep(0.3)
        peers = (0, 2) if r == 1 else (1,)
        with comm.use(**how):
            ops = [comm.P2POp(kind, tensor(group) if kind == "isend" else got[peer], peer, group)
                   for peer in peers for kind in ("isend", "irecv")]
            for handle in comm.batch_isend_irecv(ops):
                handle.wait()
        return [got[peer][0, 1].item() for peer in peers]

    assert pool(3).run(step) == [[101], [1, 201], [101]]


# C5: what is under way is changed, or let go of


@pytest.mark.parametrize("how", [debug, pytest.param({"transport": "shm", "debug": True}, id="shm", marks=linux)])
def test_debug_mode_finds_what_is_changed_before_its_wait(pool, how):
    def step(group):
        x = torch.arange(500_000.0)
        with comm.use(**how):
            if group.rank() == 1:
                time.sleep(0.2)
                comm.recv(torch.empty(500_000), 0, group, tag=2)
                return comm.recv(torch.empty(2), 0, group)[1].item()
            handle = comm.send(x, 1, group, async_op=True, tag=2)
            x[7] = 9
            text = said(handle.wait)
            comm.send(torch.tensor([1.0, 2.0]), 1, group)  # what comes after is not harmed
            return text

    text, after = pool(2).run(step)
    assert "what rank 0 sends to rank 1, float32 (500000,), tag 2, was changed before its wait()" in text and after == 2


@pytest.mark.parametrize("how", [gloo, debug, shm])
def test_a_handle_that_is_dropped_does_not_lose_its_message(pool, how):
    """gloo gives up a send that nobody holds, and its receiver waits for ever."""
    def step(group):
        with comm.use(**how):
            if group.rank() == 0:
                comm.send(torch.arange(8.0).view(4, 2)[:, 1], 1, group, async_op=True)
                gc.collect()
                comm.send(torch.tensor([5.0]), 1, group)
                return None
            time.sleep(0.2)
            return comm.recv(torch.empty(4), 0, group).tolist(), comm.recv(torch.empty(1), 0, group).item()

    assert pool(2).run(step) == [None, ([1, 3, 5, 7], 5)]


# C6: two messages of the same shape, taken in the other order


@pytest.mark.parametrize("how", [debug, shm])
def test_a_message_taken_for_another_is_named_with_both_tags(pool, how):
    def step(group, tags):
        zero, one = torch.zeros(3), torch.ones(3)
        with comm.use(**how):
            if group.rank() == 0:
                for handle in [comm.send(zero, 1, group, True, tag=4), comm.send(one, 1, group, True, tag=5)]:
                    handle.wait()
                return None
            got, texts = torch.full((2, 3), 7.0), []
            for x, tag in zip(got, tags, strict=True):
                texts.append(said(lambda x=x, tag=tag: comm.recv(x, 0, group, tag=tag)))
            return got.tolist(), texts

    assert pool(2).run(step, (4, 5))[1] == ([[0, 0, 0], [1, 1, 1]], ["", ""])
    got, texts = pool(2).run(step, (5, 4))[1]
    assert got == [[7, 7, 7], [7, 7, 7]]  # nothing lands in the wrong place
    assert "float32 (3,), tag 5" in texts[0] and "float32 (3,), tag 4" in texts[0]
    assert "float32 (3,), tag 4" in texts[1] and "float32 (3,), tag 5" in texts[1]


@pytest.mark.parametrize("how", [debug, shm])
@pytest.mark.parametrize(("other", "words"), [
    (torch.zeros(3, dtype=torch.int32), "int32 (3,), tag 0"), (torch.zeros(1, 3), "float32 (1, 3), tag 0"),
    (torch.zeros(2), "float32 (2,), tag 0"), (torch.zeros(4), "float32 (4,), tag 0")])
def test_a_message_of_another_dtype_or_shape_is_refused_by_its_receiver(pool, how, other, words):
    def step(group):
        with comm.use(**how):
            if group.rank() == 0:
                return comm.send(torch.ones(3), 1, group).tolist()
            return said(lambda: comm.recv(other, 0, group))

    sent, text = pool(2).run(step)
    assert sent == [1, 1, 1] and "float32 (3,), tag 0" in text and words in text


def under_way(group, how):
    """Rank 0 has a send under way while both ranks add up, by messages of as many bytes."""
    x, y = torch.tensor([5.0, 6.0]), torch.arange(4.0) + 10 * group.rank()
    with comm.use(**how):
        handle = comm.send(x, 1, group, async_op=True) if group.rank() == 0 else None
        total = comm.all_reduce(y, group=group).tolist()
        return total, (handle.wait() if handle else comm.recv(torch.zeros(2), 0, group)).tolist()


@pytest.mark.parametrize("how", [gloo, shm, *(pytest.param({"algorithm": name}, id=name)
                                              for name in TABLE["all_reduce"])])
def test_a_message_under_way_is_not_taken_for_one_of_a_collective(pool, how):
    assert pool(2).run(under_way, how) == [([10, 12, 14, 16], [5, 6])] * 2


@linux
def test_through_shared_memory_it_is_refused_where_the_collective_is_made_of_messages():
    error = failing(lambda group: under_way(group, {}), 2, algorithm="ring", transport="shm")
    assert "rank 1 waits for all_reduce(sum) float32 (4,)" in str(error) and "float32 (2,), tag 0" in str(error)


@pytest.mark.parametrize("how", [gloo, shm])
def test_messages_of_two_groups_of_the_same_ranks_are_not_mixed_up(pool, how):
    """gloo keeps them apart; shared memory has one order for a pair, and says so."""
    def step(group):
        one, two = dist.new_group([0, 1]), dist.new_group([0, 1])
        with comm.use(**how):
            if group.rank() == 0:
                for handle in [comm.send(torch.ones(2), 1, one, True), comm.send(torch.zeros(2), 1, two, True)]:
                    handle.wait()
                out = None
            else:
                got = torch.full((2, 2), 7.0)
                out = [said(lambda: comm.recv(got[0], 0, two)), said(lambda: comm.recv(got[1], 0, one)), *got.tolist()]
        comm.barrier(group)
        for some in (one, two):
            dist.destroy_process_group(some)
        return out

    *texts, zeros, ones = pool(2).run(step)[1]
    if how == {}:
        assert (texts, zeros, ones) == (["", ""], [0, 0], [1, 1])
    else:
        assert all(len(set(re.findall(r"tag 0, group \S+", text))) == 2 for text in texts) and zeros == ones == [7, 7]


# C8, C1, C2: ranks that differ, in every verb


def verbs(group, x, root=0):
    """Each verb on the (p·n, …) tensor `x`."""
    whole = x if group.rank() == root else None
    return {
        "all_reduce": lambda: comm.all_reduce(x, group=group), "reduce": lambda: comm.reduce(x, root, group=group),
        "reduce_scatter": lambda: comm.reduce_scatter(x, group=group), "all_gather": lambda: comm.all_gather(x, group),
        "all_to_all": lambda: comm.all_to_all(x, group=group), "broadcast": lambda: comm.broadcast(x, root, group),
        "gather": lambda: comm.gather(x, root, group),
        "scatter": lambda: comm.scatter(x[: len(x) // group.size()].clone(), whole, root, group)}


@pytest.mark.parametrize("how", [debug, pytest.param({"algorithm": "ring", "debug": True}, id="messages"),
                                 pytest.param({"transport": "shm", "debug": True}, id="shm", marks=linux)])
@pytest.mark.parametrize(("change", "words"), [
    (lambda x: x.view(torch.int32), ("float32", "int32")), (lambda x: x.view(2, 2, 3, 1), ("2, 3)", "2, 3, 1)")),
    (lambda x: x[..., :2], ("3)", "2)"))], ids=["dtype", "shape", "size"])
def test_debug_mode_compares_every_verb_on_all_ranks(pool, how, change, words):
    """Tensors of as many bytes among them, which nothing else would tell apart."""
    def step(group):
        x = torch.arange(12.0).view(2, 2, 3) + 100 * group.rank()
        with comm.use(**how):
            return {verb: said(call) for verb, call in verbs(group, change(x) if group.rank() else x).items()}

    for out in pool(2).run(step):
        for verb, text in out.items():
            assert all(word in text for word in words) and verb in text, (verb, text)


def test_debug_mode_compares_the_blocks_of_an_all_to_all(pool):
    def step(group):
        taken = [[1, 1], [2, 1]][group.rank()]  # rank 1 expects two rows of rank 0, which has one
        with comm.use(debug=True):
            return said(lambda: comm.all_to_all(torch.ones(2, 3), [1, 1], taken, group))

    for text in pool(2).run(step):
        assert "rank 0 has 12 B for rank 1, which takes 24 from it" in text and "output_split_sizes" in text


def odd(group):
    comm.all_reduce(torch.ones(4 + 4 * (group.rank() == 1), 8), group=group)


def mixed(group):
    comm.all_reduce(tensor(group, torch.float64 if group.rank() == 1 else torch.float32), group=group)


def crossed(group):
    calls = [comm.all_gather, lambda x, group: comm.all_reduce(x, group=group)]
    for call in reversed(calls) if group.rank() == 1 else calls:
        call(tensor(group), group)


@pytest.mark.parametrize("how", [pytest.param({"algorithm": name}, id=name)
                                 for name in ("ring", "doubling", "halving", "tree", "naive")])
@pytest.mark.parametrize("step", [odd, mixed, crossed])
def test_ranks_that_differ_end_with_a_report_without_debug_mode_too(step, how):
    """gloo ends a process that gets more than it has room for; who gets less waits, or is told that it lost a peer."""
    error = failing(step, timeout=1, **how)
    assert type(error) in (RankError, RankExited, RankTimeout)
    assert "all_reduce(sum)" in str(error) or "all_gather" in str(error)
    assert any(f"(4, 8) {WORLD}" in line or f"(8, 8) {WORLD}" in line for line in others(error).values())
    if type(error) is RankExited:
        assert "killed by SIGABRT; gloo does this when ranks disagree on a dtype or a size" in str(error)


# C11: a rank fails while the others wait for it


def raises():
    raise ValueError("no such expert")


@pytest.mark.parametrize(("algorithm", "size", "culprit"), [
    ("ring", 3, 1), ("doubling", 3, 1), ("halving", 3, 1), ("tree", 4, 2), ("naive", 3, 0), ("two_level", 4, 1)])
@pytest.mark.parametrize(("how", "kind", "words"), [
    (raises, RankError, "raised ValueError: no such expert"), (lambda: os._exit(5), RankExited, "exit code 5"),
    (lambda: os.kill(os.getpid(), signal.SIGKILL), RankExited, "was killed by SIGKILL")],
    ids=["raises", "exits", "killed"])
def test_a_rank_that_fails_within_an_algorithm_is_named_and_so_is_who_waits_for_whom(
        algorithm, size, culprit, how, kind, words):
    link = LinkSpec(name="at once", per_direction=1e15)
    topology = Topology(nodes=2, per_node=2, between=link) if algorithm == "two_level" else None

    def step(group):
        add = made.COMBINE["sum"]

        def combine(x, other):
            if len(x) > 1:
                time.sleep(0.1)  # the others wait already
                how()
            return add(x, other)

        if group.rank() == culprit:
            made.COMBINE["sum"] = combine
        comm.all_reduce(tensor(group), group=group)

    error = failing(step, size, algorithm=algorithm, topology=topology)
    assert type(error) is kind and error.rank == culprit and words in str(error).splitlines()[0]
    assert len(others(error)) == size - 1
    for line in others(error).values():
        assert re.search(r"all_reduce\(sum\) float32 \(4, 8\) on axis world, ranks \[0, 1, 2(, 3)?\]: "
                         r"(sending to|waiting for) rank \d", line), line


MESSAGES = {"algorithm": "ring"}


@pytest.mark.parametrize(("verb", "how"), [
    *[(verb, MESSAGES) for verb in ("all_reduce", "reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast",
                                    "gather", "scatter")],
    ("all_reduce", {}), ("scatter", {}), pytest.param("all_reduce", {"transport": "shm"}, marks=linux),
    pytest.param("scatter", {"transport": "shm"}, marks=linux)])
def test_a_rank_that_leaves_out_a_verb_is_waited_for_by_name(verb, how):
    def step(group):
        x = torch.arange(6.0) + 100 * group.rank()
        if group.rank() != 1:
            verbs(group, x)[verb]()

    error = failing(step, timeout=1, **how)
    assert type(error) is RankTimeout and "rank 1 │ has returned" in str(error)
    waits = [line for line in others(error).values() if re.search(rf" in {verb}.* {re.escape(WORLD)}.*, for \d", line)]
    assert waits
    if how == MESSAGES:
        assert any(re.search(r"(sending to|waiting for) rank 1", line) for line in waits)


# C16: what gloo has


def test_gloo_has_every_verb_and_adds_just_the_dtypes_that_are_said_to(pool):
    """A support matrix: should a version of torch differ, this says in what."""
    numbers = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
               torch.int8, torch.uint8, torch.uint16, torch.float8_e4m3fn, torch.complex64]

    def step(group):
        adds = set()
        for dtype in numbers:
            try:
                for op in backend.REDUCE.values():
                    x = torch.ones(2).to(dtype)
                    dist.all_reduce(x, op, group)
                    dist.reduce(x, 0, op, group)
                    backend._REDUCE_SCATTER(x[:1].clone(), x, op=op, group=group)
                adds.add(dtype)
            except (RuntimeError, ValueError):  # on every rank alike, before anything is sent
                pass
        x, one = torch.zeros(2, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
        pieces = [torch.zeros_like(x) for _ in range(2)]
        backend._ALL_GATHER(torch.zeros(4, dtype=torch.uint8), x, group=group)
        dist.all_to_all_single(one.expand(2).clone(), x, [1, 1], [1, 1], group)
        dist.broadcast(x, 0, group)
        dist.gather(x, pieces if group.rank() == 0 else None, 0, group)
        dist.scatter(x, pieces if group.rank() == 0 else None, 0, group)
        return adds

    assert pool(2).run(step) == [backend.GLOO_ADDS] * 2
