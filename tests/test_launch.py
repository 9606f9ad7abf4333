"""Ranks: what they are given, what they give back, and what they leave behind, which is nothing."""

import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time
import typing
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import eventually, family

from shardlab import comm
from shardlab.launch import RankError, RankExited, RankTimeout, launch, ranks, run

linux = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="looks into /proc, which only Linux has")
SCALE = 3


@dataclass
class Answer:
    rank: int
    total: torch.Tensor


def add(group, numbers, scale=1):
    total = numbers * scale * (group.rank() + 1)
    dist.all_reduce(total, group=group)
    return Answer(group.rank(), total * SCALE)


def who(group):
    return os.getpid()


def descriptors(pid="self"):
    return sorted(os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink())


@pytest.fixture
def temp(tmp_path, monkeypatch):
    """An empty folder, in which launches make their own ones."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


# what goes out and comes back


def test_results_come_in_rank_order_with_arguments_given_to_all():
    answers = launch(add, 3, torch.tensor([1.0, 2.0]), scale=10)
    assert [answer.rank for answer in answers] == [0, 1, 2]
    for answer in answers:
        assert type(answer) is Answer and answer.total.tolist() == [180.0, 360.0]


def test_a_function_that_says_torch_and_ops_travels(pool):
    """`torch.ops` and `torch.classes` stand in sys.modules and are no modules that cloudpickle knows."""
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.ops, self.classes = 3, torch.nn.Linear(2, 2)

    def total(group):
        layer = Layer()
        added = torch.ops.aten.add(comm.ops.all_reduce(torch.ones(2), group=group), layer.ops)
        return added.tolist(), type(layer.classes).__name__

    assert pool(2).run(total) == [([5.0, 5.0], "Linear")] * 2


@dataclass(frozen=True, slots=True)
class Slotted:
    rank: int


def test_named_tuples_of_the_readers_own_go_and_come(pool):
    class Pair(typing.NamedTuple):
        rank: int
        twice: int = 0

        def total(self):
            return self.rank + self.twice

    def run(group, given):
        return Pair(given.total() + group.rank(), twice=2 * group.rank())

    assert pool(2).run(run, Pair(1, 4)) == [(5, 0), (6, 2)]
    assert pool(2).run(run, Pair(1, 4))[1].total() == 8


def test_results_with_slots_come_back_as_what_they_are(pool):
    @dataclass(slots=True)
    class Local:
        rank: int

    assert pool(2).run(lambda group: Slotted(group.rank())) == [Slotted(0), Slotted(1)]
    assert pool(2).run(lambda group: Local(group.rank())) == [Local(0), Local(1)]


def test_a_result_that_can_not_be_made_again_names_the_function(pool):
    class Trap:
        def __reduce__(self):
            return int, ("no number",)

    def give(group):
        return Trap()

    with pytest.raises(TypeError, match=r"what .*give returned can't be read here: ValueError"):
        pool(2).run(give)


def test_runs_from_several_threads_take_turns():
    with ranks(2) as r, ThreadPoolExecutor(4) as threads:
        outs = list(threads.map(lambda i: r.run(lambda group: (i, group.rank())), range(12)))
    assert outs == [[(i, 0), (i, 1)] for i in range(12)]


def test_prints_that_the_output_can_not_encode_are_escaped(monkeypatch):
    import io
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", ascii_only)
    assert launch(lambda group: print("é │") or 7, 1) == [7]
    ascii_only.flush()
    assert ascii_only.buffer.getvalue() == b"[rank 0] \\xe9 \\u2502\n"


def test_a_start_that_fails_leaves_no_folder(temp, monkeypatch):
    def none_left(*_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("shardlab.launch.crew.Pipe", none_left)
    with pytest.raises(OSError, match="Too many"):
        launch(who, 2)
    assert not list(temp.iterdir())


def test_ctrl_c_before_the_ranks_are_told_what_they_are_ends_at_once(temp, monkeypatch):
    from shardlab.launch import crew
    request = crew.Server.request

    def interrupted(self, descriptors):
        request(self, descriptors)
        raise KeyboardInterrupt

    monkeypatch.setattr(crew.Server, "request", interrupted)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        launch(who, 2)
    assert time.monotonic() - start < 15 and not list(temp.iterdir())


def test_closures_partials_methods_and_classes_travel_by_value(pool):
    offset = 40

    class Local:
        def run(self, group):
            return group.rank() + offset

    assert pool(2).run(Local().run) == [40, 41]
    assert pool(2).run(partial(add, scale=2), torch.ones(1))[1] == Answer(1, torch.tensor([18.0]))
    assert pool(2).run(lambda group: (__name__, __name__ in sys.modules)) == [("test_launch", False)] * 2


def test_a_module_that_cannot_travel_is_imported_by_the_ranks(tmp_path, monkeypatch, pool):
    (tmp_path / "holds_a_lock.py").write_text("import threading\nlock = threading.Lock()\n"
                                              "def locked(group):\n    with lock:\n        return group.rank()\n")
    monkeypatch.syspath_prepend(tmp_path)
    import holds_a_lock

    assert launch(holds_a_lock.locked, 2) == [0, 1]


def test_large_tensors_come_back_by_value(pool):
    def big(group):
        return torch.full((12_500_000,), float(group.rank())), torch.arange(6.0).view(2, 3).t(), torch.ones(2).bool()

    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    for rank, (values, strided, flags) in enumerate(pool(2).run(big)):
        assert values.shape == (12_500_000,) and (values == rank).all()
        assert strided.tolist() == [[0, 3], [1, 4], [2, 5]] and flags.dtype == torch.bool
    assert not before or not {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("torch_")}


def test_a_result_of_autograd_comes_back(pool):
    assert pool(2).run(lambda group: (torch.ones(2, requires_grad=True) * 2).sum())[0].item() == 4


def test_ranks_see_the_environment_folder_and_path_of_the_caller(tmp_path, monkeypatch):
    launch(who, 1)  # the server is there before they change
    monkeypatch.setenv("SHARDLAB_TEST", "seen")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "lib")
    seen = launch(lambda group: (os.environ["SHARDLAB_TEST"], os.getcwd(), sys.path[0], sys.stdin.read()), 1)
    assert seen == [("seen", str(tmp_path), str(tmp_path / "lib"), "")]


@pytest.mark.parametrize("threads", [1, 3])
def test_a_rank_has_the_threads_asked_for(threads):
    assert launch(lambda group: torch.get_num_threads(), 2, threads=threads) == [threads, threads]


def test_a_rank_may_start_processes_of_its_own(pool):
    def load(group):
        return [int(batch) for batch in torch.utils.data.DataLoader(range(3), num_workers=1)]

    assert pool(2).run(load) == [[0, 1, 2]] * 2


# what ranks print


def test_prints_are_labelled_and_in_rank_order(capsys):
    def say(group):
        time.sleep(0.2 * (1 - group.rank()))  # the last rank speaks first
        print("out of", group.rank())
        print("note", file=sys.stderr)
        os.write(1, b"raw\n")
        print("1 %\r50 %\r99 %")
        print("no newline", end="")

    launch(say, 2)
    lines = ["out of {}", "note", "raw", "99 %", "no newline"]
    expected = [f"[rank {rank}] {line.format(rank)}" for rank in (0, 1) for line in lines]
    assert capsys.readouterr().out.splitlines() == expected


def test_the_first_rank_is_heard_while_it_works(pool, capsys):
    heard = []

    def slow(group):
        print("epoch 1")
        time.sleep(1)

    thread = threading.Thread(target=lambda: pool(2).run(slow))
    thread.start()
    assert eventually(lambda: heard.append(capsys.readouterr().out) or "".join(heard).startswith("[rank 0] epoch"))
    assert thread.is_alive()
    thread.join()
    assert "".join(heard) + capsys.readouterr().out == "[rank 0] epoch 1\n[rank 1] epoch 1\n"


def test_a_second_run_does_not_repeat_the_prints_of_the_first(capsys):
    with ranks(2) as r:
        r.run(lambda group: print("first"))
        r.run(lambda group: print("second"))
    assert capsys.readouterr().out == "[rank 0] first\n[rank 1] first\n[rank 0] second\n[rank 1] second\n"


# ranks that stay


def test_ranks_stay_between_calls_and_answer_within_milliseconds():
    def remember(group):
        sys.modules["torch"].remembered = getattr(sys.modules["torch"], "remembered", 0) + 1
        return sys.modules["torch"].remembered

    with ranks(2) as r:
        pids = r.run(who)
        times = []
        for count in range(1, 21):
            start = time.perf_counter()
            assert r.run(remember) == [count, count]
            times.append(time.perf_counter() - start)
        assert r.run(who) == pids and len(set(pids)) == 2
        assert min(times) < 0.02
    with pytest.raises(ValueError, match="closed"):
        r.run(who)


def test_ranks_have_a_folder_as_long_as_they_live(temp):
    """From their start, which may come before their first run; it goes with them, also where they are killed."""
    with ranks(2) as r:
        folder = r.start()
        assert folder.parent == temp and folder.is_dir() and r.start() == folder
        (folder / "mine").touch()
        pids = r.run(who)
        assert len(pids) == 2 and (folder / "mine").exists()
    assert not list(temp.iterdir())
    with pytest.raises(ValueError, match="closed"):
        r.start()
    with ranks(1) as r:
        folder = r.start()
        with pytest.raises(RankExited):
            r.run(lambda group: os._exit(3))
        assert not folder.exists() and r.start() != folder


def test_after_a_failure_the_next_run_has_fresh_ranks():
    with ranks(2) as r:
        before = r.run(who)
        with pytest.raises(RankError):
            r.run(lambda group: 1 / 0)
        after = r.run(who)
        assert set(before).isdisjoint(after)
        assert [answer.rank for answer in r.run(add, torch.ones(1))] == [0, 1]


def test_a_rank_killed_between_two_runs_is_reported_by_the_next():
    with ranks(2) as r:
        os.kill(r.run(who)[1], 9)
        time.sleep(0.2)
        with pytest.raises(RankExited, match="rank 1 of 2 was killed by SIGKILL"):
            r.run(who)
        assert len(r.run(who)) == 2


# what is refused before anything starts


@pytest.mark.parametrize(("call", "error", "words"), [
    (lambda: launch(who, 0), ValueError, "ranks must be 1 or more, not 0"),
    (lambda: launch(who, 2.0), TypeError, "ranks must be a whole number, not 2.0"),
    (lambda: launch(who, True), TypeError, "ranks must be a whole number, not True"),
    (lambda: launch(who, 1000), ValueError, "1000 ranks are more than the 200"),
    (lambda: launch(2, who), TypeError, "ranks must be a whole number"),
    (lambda: launch(2, 2), TypeError, "fn must be a function to run on every rank, not 2"),
    (lambda: launch(who, 2, timeout=0), ValueError, "timeout must be a number of seconds above 0, not 0"),
    (lambda: launch(who, 2, timeout=float("inf")), ValueError, "not inf"),
    (lambda: launch(who, 2, threads=0), ValueError, "threads must be 1 or more, not 0"),
    (lambda: launch(who, 2, backend="mpi"), ValueError, "backend must be one of auto, gloo, nccl, not 'mpi'"),
    (lambda: launch(who, 64, backend="nccl"), ValueError, "nccl wants one GPU a rank: 64 ranks"),
    (lambda: launch(who, 2, threading.Lock()), TypeError, "who and its arguments can't be sent to the ranks"),
])
def test_arguments_that_cannot_be_right(call, error, words, monkeypatch):
    monkeypatch.setattr(run, "Crew", None)  # nothing may start
    with pytest.raises(error) as raised:
        call()
    assert words in str(raised.value)


def test_ranks_in_ranks_are_refused(pool):
    def nested(group):
        try:
            launch(who, 2)
        except RuntimeError as error:
            return str(error)

    assert "a rank can't start ranks of its own" in pool(2).run(nested)[0]


@pytest.mark.parametrize("kind", [RankError, RankExited, RankTimeout])
def test_errors_can_be_pickled(kind):
    error = pickle.loads(pickle.dumps(kind("rank 1 failed\n\nthere", 1, "there")))
    assert type(error) is kind and (str(error), error.rank, error.traceback) == ("rank 1 failed\n\nthere", 1, "there")


# scripts, torchrun


def execute(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


def script(tmp_path, text):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def test_a_script_without_a_main_guard_runs_once(tmp_path):
    path = script(tmp_path, """
        from shardlab.launch import launch
        print("the script runs")
        class Pair:
            def __init__(self, group):
                self.rank = group.rank()
        pairs = launch(Pair, 2)
        assert all(type(pair) is Pair for pair in pairs)
        print([pair.rank for pair in pairs])
    """)
    done = execute(sys.executable, path)
    assert (done.stdout, done.stderr) == ("the script runs\n[0, 1]\n", "")


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def test_under_torchrun_the_function_runs_in_its_processes(tmp_path):
    path = script(tmp_path, """
        import os, torch, torch.distributed as dist
        from shardlab.launch import launch, ranks
        def total(group, x):
            x = torch.tensor([x * (group.rank() + 1.0)])
            dist.all_reduce(x, group=group)
            return os.getpid(), group.rank(), x.item()
        first, second = launch(total, 2, 10, threads=1), launch(total, 2, 20)
        with ranks(2) as r:
            third = r.run(total, 30)
        assert first[dist.get_rank()][0] == os.getpid() and first[0][0] != first[1][0]
        try:
            launch(total, 3, 10)
        except ValueError as error:
            print(f"{[x[1:] for x in first + second + third]} {error}\\n", end="")
    """)
    done = execute(*TORCHRUN, path)
    expected = ("[(0, 30.0), (1, 30.0), (0, 60.0), (1, 60.0), (0, 90.0), (1, 90.0)] 3 ranks asked for, but torchrun "
                "has started 2 processes: use torchrun --nproc-per-node 3, or ranks=2")
    assert done.stdout.splitlines() == [expected] * 2, done.stderr
    assert "Warning" not in done.stderr.replace("OMP_NUM_THREADS", "")


@pytest.mark.more
def test_under_torchrun_links_are_slowed_too(tmp_path):
    path = script(tmp_path, """
        import time, torch
        from shardlab import comm
        from shardlab.launch import launch
        from shardlab.specs import LinkSpec, Topology
        def total(group):
            start = time.monotonic()
            x = comm.all_reduce(torch.ones(2) + group.rank(), group=group)  # a message each way, twice
            return x[0].item(), time.monotonic() - start
        slow = Topology(nodes=2, per_node=1, between=LinkSpec(name="slow", per_direction=1e6, alpha=0.2))
        results = launch(total, 2, topology=slow)
        assert [x for x, _ in results] == [3.0, 3.0] and min(seconds for _, seconds in results) > 0.2
    """)
    done = execute(*TORCHRUN, path)
    assert done.returncode == 0, done.stderr


# many of them, and what they leave


@pytest.mark.more
@linux
def test_two_hundred_launches_four_at_a_time_leave_nothing(temp):
    launch(who, 2)
    alive = family()
    before = descriptors(), descriptors(run._server._process.pid), set(os.listdir("/dev/shm"))
    with ThreadPoolExecutor(4) as four:
        jobs = [four.submit(launch, add, 2, torch.tensor([float(n)])) for n in range(200)]
        totals = [[answer.total.item() for answer in job.result()] for job in jobs]
    assert totals == [[9.0 * n, 9.0 * n] for n in range(200)]
    assert eventually(lambda: family() == alive)  # no process, and so no port
    assert len(os.listdir(f"/proc/{run._server._process.pid}/task")) == 1  # safe to fork
    after = descriptors(), descriptors(run._server._process.pid), set(os.listdir("/dev/shm"))
    assert [len(each) for each in after[:2]] == [len(each) for each in before[:2]]
    assert not {name for name in after[2] - before[2] if "torch" in name or "gloo" in name}
    assert list(temp.iterdir()) == []


@linux
def test_two_hundred_runs_of_ranks_that_stay_leave_nothing(temp):
    launch(who, 1)
    alive = family()
    with ranks(2) as r:
        pids = r.run(who)
        before = descriptors(), [len(descriptors(pid)) for pid in pids]
        for n in range(200):
            assert r.run(add, torch.tensor([float(n)]))[1].total.item() == 9.0 * n
        assert (descriptors(), [len(descriptors(pid)) for pid in pids]) == before
        assert len(family() - alive) == 3  # a warden and two ranks
    assert eventually(lambda: family() == alive)
    assert list(temp.iterdir()) == []


@pytest.mark.more
def test_two_processes_launch_twice_at_once(tmp_path):
    path = script(tmp_path, """
        from concurrent.futures import ThreadPoolExecutor
        import torch, torch.distributed as dist
        from shardlab.launch import launch
        def total(group):
            x = torch.ones(1)
            dist.all_reduce(x)
            return x.item()
        with ThreadPoolExecutor(2) as two:  # the very first launch of the process too
            assert all(job.result() == [2.0, 2.0] for job in [two.submit(launch, total, 2) for _ in range(6)])
    """)
    both = [subprocess.Popen([sys.executable, path]) for _ in range(2)]
    assert [process.wait(60) for process in both] == [0, 0]
