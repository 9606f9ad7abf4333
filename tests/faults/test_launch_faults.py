"""FAULTS.md C8 and C11–C15: a rank that fails says so at once, by name, and takes nothing and nobody with it."""

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import nbformat
import pytest
import torch
import torch.distributed as dist
from nbclient import NotebookClient

from shardlab import comm
from shardlab.launch import RankError, RankExited, RankTimeout, launch, ranks

linux = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="looks into /proc, which only Linux has")


@pytest.fixture(autouse=True)
def guard():
    """No failure may take 20 seconds."""
    def late(*_):
        raise AssertionError("20 seconds are over")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module", autouse=True)
def server():
    """The first launch imports torch; the faults are timed without it."""
    launch(lambda group: None, 1)


def failing(fn, size=3, **options):
    """The error that launching `fn` raises, and the seconds until then."""
    start = time.monotonic()
    with pytest.raises(RankError) as raised:
        launch(fn, size, **options)
    return raised.value, time.monotonic() - start


def meet(group):
    comm.all_reduce(torch.ones(4, 8), group=group)


def lines(error):
    return str(error).splitlines()


# C11: one rank fails, the others wait for it


def test_a_rank_that_raises_is_shown_with_its_traceback_first_and_what_the_others_did(capsys):
    def step(group):
        if group.rank() == 1:
            print("before")
            raise ValueError("no such expert")
        meet(group)

    error, seconds = failing(step)
    assert type(error) is RankError and error.rank == 1 and seconds < 5
    assert lines(error)[0] == "rank 1 of 3 raised ValueError: no such expert"
    assert lines(error)[2] == "Traceback (most recent call last):"
    assert re.match(r'  File ".*test_launch_faults.py", line \d+, in step', lines(error)[3])
    assert lines(error)[4] == '    raise ValueError("no such expert")'
    assert "rank.py" not in str(error)  # nothing of the launcher's
    assert error.traceback.splitlines()[-1] == "ValueError: no such expert"
    others = [line for line in lines(error) if line.startswith("rank ")][1:]
    assert [other[:6] for other in others] == ["rank 0", "rank 2"]
    for other in others:
        assert "meet, line " in other and "in all_reduce(sum) float32 (4, 8) on axis world, ranks [0, 1, 2]" in other
    assert capsys.readouterr().out == "[rank 1] before\n"


def test_the_first_failure_is_shown_and_not_the_connection_that_it_cost_another_rank():
    def step(group):
        if group.rank() == 0:
            raise RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:4711")
        time.sleep(0.4 if group.rank() == 2 else 5)
        raise ValueError("the cause")

    error, seconds = failing(step)
    assert error.rank == 2 and "the cause" in lines(error)[0] and seconds < 5
    assert any("rank 0 │ lost its connection" in line for line in lines(error))


def test_a_lost_connection_that_nothing_explains_is_shown():
    def step(group):
        if group.rank() == 0:
            raise ConnectionResetError("Connection reset by server")
        time.sleep(10)

    error, seconds = failing(step, 2)
    assert "rank 0 of 2 raised ConnectionResetError" in lines(error)[0] and seconds < 5


def test_the_same_failure_everywhere_is_shown_once_for_the_lowest_rank():
    def step(group):
        time.sleep(0.02 * (2 - group.rank()))
        raise ZeroDivisionError("everywhere")

    error, seconds = failing(step)
    assert error.rank == 0 and seconds < 5
    assert str(error).count("Traceback") == 1 and str(error).count("│ raised ZeroDivisionError: everywhere") == 2


# ranks that end


def leaving(how):
    def step(group):
        if group.rank() == 1:
            time.sleep(0.1)  # the others wait already
            how()
        meet(group)

    return step


@pytest.mark.parametrize(("how", "words"), [
    (lambda: sys.exit(3), "called sys.exit(3)"),
    (lambda: sys.exit("enough"), "called sys.exit('enough')"),
    (lambda: os._exit(5), "ended its process with exit code 5"),
    (lambda: os._exit(0), "ended its process with exit code 0"),
    (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL; the system does this when memory runs out"),
    (lambda: os.kill(os.getpid(), signal.SIGTERM), "was killed by SIGTERM"),
    (lambda: os.abort(), "was killed by SIGABRT"),
], ids=["sys.exit", "sys.exit-text", "exit-code", "exit-zero", "SIGKILL", "SIGTERM", "abort"])
def test_a_rank_that_ends_is_named_with_how_it_ended(how, words):
    error, seconds = failing(leaving(how))
    assert type(error) is RankExited and error.rank == 1 and seconds < 5
    assert lines(error)[0].startswith(f"rank 1 of 3 {words}")
    assert "all_reduce(sum)" in str(error)


def test_where_a_rank_crashed_is_shown_in_python():
    error, _ = failing(leaving(os.abort))
    assert lines(error)[2] == "Traceback (most recent call last):" and "line" in lines(error)[3]
    assert error.traceback.rstrip().endswith("how()")


def test_an_abort_inside_gloo_is_an_error_with_the_line_that_led_there():  # C8
    def step(group):
        comm.all_reduce(torch.ones(4, dtype=torch.float64 if group.rank() else torch.float32))

    error, seconds = failing(step, 2)
    assert type(error) is RankExited and seconds < 5
    assert "was killed by SIGABRT; gloo does this when ranks disagree on a dtype" in lines(error)[0]
    assert "comm.all_reduce(torch.ones(4, dtype" in error.traceback


# hangs, C15


def test_a_hang_ends_at_its_limit_with_a_table_of_what_each_rank_did():
    def step(group):
        if group.rank() == 1:
            return "done"
        if group.rank() == 2:
            comm.barrier(group=dist.new_group([2]))
            time.sleep(30)
        meet(group)

    error, seconds = failing(step, timeout=1)
    assert type(error) is RankTimeout and error.rank == 0 and 1 <= seconds < 6
    assert lines(error)[0] == "2 of 3 ranks did not return within 1 s"
    zero, one, two = [line.split(" │ ") for line in lines(error)[2:5]]
    assert "comm.use(debug=True)" in lines(error)[-1]
    assert zero[0] == "rank 0" and "meet, line" in zero[1]
    assert re.match(r"in all_reduce\(sum\) float32 \(4, 8\) on axis world, ranks \[0, 1, 2\], for \d\.\d s", zero[2])
    assert one[1].strip() == "has returned" and one[2] == "no collective entered yet"
    assert "time.sleep(30)" in two[1] and two[2].startswith("in its own code for")
    assert error.traceback.startswith("Traceback") and "meet" in error.traceback


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has real-time signals")
def test_a_signal_without_a_name_is_given_by_its_number():
    def step(group):
        os.kill(os.getpid(), 40)
        time.sleep(30)

    error, _ = failing(step)
    assert type(error) is RankExited and "was killed by signal 40" in lines(error)[0]


def test_an_error_that_can_not_say_what_it_is_is_shown_all_the_same():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError("speechless")

    def step(group):
        raise Mute

    error, _ = failing(step)
    assert type(error) is RankError and "its own text raises RuntimeError" in lines(error)[0]
    assert "raise Mute" in error.traceback


def test_prints_of_a_rank_that_hangs_are_not_lost(capsys):
    def step(group):
        print("start", group.rank())
        print("half a line", end="")
        time.sleep(30)

    failing(step, 2, timeout=0.5)
    assert capsys.readouterr().out == "".join(f"[rank {r}] start {r}\n[rank {r}] half a line\n" for r in (0, 1))


def test_a_rank_stuck_in_c_code_that_holds_the_interpreter_is_ended_too():
    def step(group):
        re.match(r"(a+)+$", "a" * 40 + "b")  # for hours, without letting another thread run

    error, seconds = failing(step, 2, timeout=1)
    assert type(error) is RankTimeout and seconds < 6 and "re.match" in lines(error)[2]


# results and functions that cannot travel


def test_a_result_that_cannot_travel_is_named_with_its_function():
    def count(group):
        return (n for n in range(3))

    error, seconds = failing(count, 2)
    assert "count returned a generator, which can't be sent back" in lines(error)[0] and seconds < 5


# interrupts


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.1, 0.4])
def test_an_interrupt_at_any_moment_ends_the_ranks_and_the_next_call_works(seconds, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    interrupt = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    with ranks(2) as r:
        with pytest.raises(KeyboardInterrupt):
            interrupt.start()
            r.run(lambda group: time.sleep(30))
        assert list(tmp_path.iterdir()) == []  # gone with the ranks
        assert r.run(lambda group: group.rank()) == [0, 1]


def test_a_rank_does_not_leave_the_processes_that_it_started():
    def step(group):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        Path(folder, str(child.pid)).touch()
        time.sleep(30)

    import tempfile
    with tempfile.TemporaryDirectory() as folder:
        failing(step, 2, timeout=1)
        for pid in map(int, os.listdir(folder)):
            deadline = time.monotonic() + 5
            while alive(pid) and time.monotonic() < deadline:
                time.sleep(0.02)
            assert not alive(pid)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@linux
def test_ranks_do_not_outlive_a_parent_that_is_killed(tmp_path):
    signal.alarm(60)  # a fresh process imports torch, and its server too
    code = textwrap.dedent(f"""
        import os, re, tempfile, time
        from shardlab.launch import launch
        tempfile.tempdir = {str(tmp_path)!r}
        def step(group):
            os.write(1, b"%d %d\\n" % (os.getpid(), os.getppid()))
            if group.rank() == 0:
                time.sleep(60)
            re.match("(a+)+$", "a" * 40 + "b")  # lets no other thread of the rank run
        launch(step, 2, timeout=60)
    """)
    parent = subprocess.Popen([sys.executable, "-u", "-c", code], stdout=subprocess.PIPE, text=True)
    rank, warden = map(int, parent.stdout.readline().removeprefix("[rank 0]").split())
    time.sleep(0.3)
    started = [int(stat.parent.name) for stat in Path("/proc").glob("[0-9]*/stat") if parent_of(stat) == warden]
    assert rank in started and len(started) == 2 and alive(warden) and list(tmp_path.iterdir())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 5
    while any(map(alive, [*started, warden])) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(alive, [*started, warden])) and list(tmp_path.iterdir()) == []


def parent_of(stat):
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


# C13: names and interfaces


UNSHARE = ["unshare", "--uts", "sh", "-c", 'hostname no-such-host.invalid && exec "$0" "$@"']


def can_rename_host():
    return bool(shutil.which("unshare")) and subprocess.run([*UNSHARE, "true"], capture_output=True).returncode == 0


@pytest.mark.more
@pytest.mark.skipif(not can_rename_host(), reason="a host name of one's own wants unshare, and root")
def test_the_name_of_the_host_need_not_resolve():
    signal.alarm(60)  # a fresh process imports torch, and its server too
    code = ("import socket, torch.distributed as dist; from shardlab.launch import launch\n"
            "print(socket.gethostname(), launch(lambda group: dist.barrier() or group.rank(), 2))")
    environ = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    done = subprocess.run([*UNSHARE, sys.executable, "-c", code], capture_output=True, text=True, env=environ)
    assert done.stdout == "no-such-host.invalid [0, 1]\n", done.stderr


def test_an_interface_that_is_asked_for_is_kept_and_a_wrong_one_says_so(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "^lo,docker0")
    error, seconds = failing(lambda group: 1, 2)
    assert "^lo" in str(error) and seconds < 5
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert launch(lambda group: os.environ["GLOO_SOCKET_IFNAME"][:2], 1) == ["lo"]


# C14, C15: a notebook


CELLS = ["""
import os, time, torch, torch.distributed as dist
from shardlab.launch import launch, ranks, run
scale = 3
""", """
class Sum:
    def __init__(self, value):
        self.value = value
def total(group):
    x = torch.tensor([group.rank() + 1.0])
    dist.all_reduce(x)
    print("sum", x.item())
    return Sum(scale * x.item())
[(type(each) is Sum, each.value) for each in launch(total, 2)]
""", """
def step(group):
    if group.rank() == 1:
        raise ValueError("wrong shard")
    dist.barrier()
r = ranks(2)
r.run(step)
""", """
print(run._server._process.pid)
def nap(group):
    time.sleep(60)
r.run(nap)
""", """
print(run._server._process.pid)
print(r.run(lambda group: group.rank()))
r.close()
"""]


@pytest.mark.more
@pytest.mark.filterwarnings("default")  # the notebook's client has its own
def test_a_notebook_launches_fails_is_interrupted_and_goes_on():
    signal.alarm(60)  # a kernel starts first
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    client = NotebookClient(notebook, timeout=40, allow_errors=True, kernel_name="python3", coalesce_streams=True)
    with client.setup_kernel():
        client.execute_cell(notebook.cells[0], 0)
        client.execute_cell(notebook.cells[1], 1)
        start = time.monotonic()
        client.execute_cell(notebook.cells[2], 2)
        kernel = client.km.provisioner.process.pid
        threading.Timer(2, os.killpg, (os.getpgid(kernel), signal.SIGINT)).start()  # what Jupyter's stop button does
        client.execute_cell(notebook.cells[3], 3)
        client.execute_cell(notebook.cells[4], 4)
        assert time.monotonic() - start < 20
    _, good, failed, interrupted, after = [cell.outputs for cell in notebook.cells]
    assert good[0].text == "[rank 0] sum 3.0\n[rank 1] sum 3.0\n"
    assert good[1].data["text/plain"] == "[(True, 9.0), (True, 9.0)]"
    assert failed[0].ename == "RankError"
    shown = "\n".join(failed[0].traceback).splitlines()
    assert shown[0] == "RankError: rank 1 of 2 raised ValueError: wrong shard"
    assert shown[4] == '    raise ValueError("wrong shard")' and shown[-1].startswith("rank 0 │ step, line 4: dist.bar")
    assert interrupted[-1].ename == "KeyboardInterrupt"
    assert after[0].text == interrupted[0].text + "[0, 1]\n"  # the server has not felt the interrupt
    assert len(after) == 1


# C3: messages that wait for each other


def test_ranks_that_all_send_first_are_told_to_start_both_messages():
    def swap(group):
        comm.send(torch.ones(4), 1 - group.rank())
        comm.recv(torch.ones(4), 1 - group.rank())

    error, seconds = failing(swap, 2, timeout=1)
    assert type(error) is RankTimeout and seconds < 5
    for rank in (0, 1):
        assert f"in send to rank {1 - rank} float32 (4,) on axis world, ranks [0, 1]" in str(error)
    assert "batch_isend_irecv" in lines(error)[-1] and "debug" not in str(error)


def test_a_batch_that_stands_still_is_shown_with_all_its_messages():
    def to_the_right(group):
        right = (group.rank() + 1) % 3  # where the left neighbour should be asked
        for handle in comm.batch_isend_irecv([comm.P2POp("isend", torch.ones(4), right),
                                              comm.P2POp("irecv", torch.ones(4), right)]):
            handle.wait()

    error, _ = failing(to_the_right, 3, timeout=1)
    where = "float32 (4,) on axis world, ranks [0, 1, 2]"
    assert f"in send to rank 1 {where}; recv from rank 1 {where}" in str(error) and "debug=True" in lines(error)[-1]
