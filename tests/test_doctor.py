"""`shardlab doctor`: what it says of this machine, and of machines that are made up."""

import importlib
import json
import sys

import pytest
from typer.testing import CliRunner

from shardlab.cli import app, checks
from shardlab.launch import RankError

GIB = 2**30
doctor = importlib.import_module("shardlab.cli.doctor")  # of the package the name is its command


def run(*arguments, **env):
    clean = {"COLUMNS": "100", "NO_COLOR": "1", "MASTER_ADDR": None}
    return CliRunner(env=clean | env).invoke(app, ["doctor", *arguments])


def test_this_machine_runs_ranks_and_its_links_are_fitted():
    done = run("--json")
    found = {each["name"]: each for each in json.loads(done.stdout)}
    assert done.exit_code == int(any(each["state"] == "fix" for each in found.values()))
    assert list(found) == ["Python", "torch", "cores", "shared memory", "open files", "host name", "interface", "GPUs",
                           "ranks, gloo", "link, gloo", "link, shm"] + ["ranks, nccl"] * ("ranks, nccl" in found)
    assert found["ranks, gloo"]["state"] == "ok" and found["ranks, gloo"]["data"]["ranks"] == 2
    assert 1e-7 < found["link, gloo"]["data"]["alpha"] < 1 and 1e5 < found["link, gloo"]["data"]["beta"] < 1e12
    if sys.platform == "linux":
        assert found["interface"]["data"]["addresses"]["lo"] == "127.0.0.1" and found["open files"]["data"]["limit"] > 0


@pytest.mark.parametrize(("check", "state", "said"), [
    (checks.python((3, 10, 2)), "fix", "install Python 3.11 or later"),
    (checks.python((3, 12, 1), "win32"), "fix", "use WSL"),
    (checks.python((3, 12, 1), "linux"), "ok", ""),
    (checks.torch_version("2.8.1+cu126"), "fix", "pip install 'torch>=2.9'"),
    (checks.torch_version("2.10.0"), "ok", ""),
    (checks.cores(8, 2, 1.5), "ok", ""),
    (checks.cores(8, 2, 2.5), "look", "others keep them busy"),
    (checks.shared_memory(64 * 2**20), "look", "--shm-size=8g"),
    (checks.shared_memory(8 * GIB), "ok", ""),
    (checks.shared_memory(None), "ok", ""),
    (checks.open_files(256), "look", "ulimit -n 65536"),
    (checks.open_files(1024), "ok", ""),
    (checks.hostname("box", "10.0.0.3", {"eth0": "10.0.0.3"}), "ok", ""),
    (checks.hostname("box", None, {"lo": "127.0.0.1", "ens5": "10.0.0.3"}), "look", "export GLOO_SOCKET_IFNAME=ens5"),
    (checks.hostname("box", "127.0.1.1", {"lo": "127.0.0.1"}), "look", "export GLOO_SOCKET_IFNAME=eth0"),
    (checks.interfaces({"eth0": "10.0.0.3"}, None, None, None), "ok", ""),
    (checks.interfaces({"eth0": "10.0.0.3"}, "ib0", None, None), "fix", "names none of them: unset it, or export eth0"),
    (checks.interfaces({"eth0": "10.0.0.3"}, "eth0", "head", "eth0"), "ok", ""),
    (checks.interfaces({"eth0": "10.0.0.3"}, None, "head", None), "fix", "see whether head is the first machine's"),
    (checks.gpus([], [], None, None, False, True), "ok", ""),
    (checks.gpus([], [], None, None, True, True), "fix", "install the PyTorch that fits"),
    (checks.gpus([], [], "12.8", None, True, True), "fix", "install the PyTorch that fits"),
    (checks.gpus(["H100"] * 2, [80 * GIB] * 2, "12.8", "2.27.3", True, True), "ok", ""),
    (checks.gpus(["H100"] * 2, [80 * GIB] * 2, "12.8", "2.27.3", True, False), "look", "nvidia-smi topo -m"),
    (checks.gpus(["H100"], [80 * GIB], "12.8", None, True, True), "fix", "this PyTorch has no NCCL"),
])
def test_what_is_wrong_comes_with_what_to_do(check, state, said):
    assert check.state == state and said in check.remedy and bool(check.remedy) == (state != "ok")
    assert check.found and json.dumps(check.data)


def test_what_needs_a_fix_is_the_exit_code_and_what_is_named_is_looked_for(monkeypatch):
    monkeypatch.setattr(doctor.checks, "file_limit", lambda: 100)  # which is no reason to fail
    monkeypatch.setattr(doctor, "_ranks", lambda backends: [checks.Check("ranks, gloo", "ok", "not tried")])
    done = run()
    assert done.exit_code == 0 and "Ranks run here." in done.stdout and "ulimit -n 65536" in done.stdout, done.output
    wrong = run("--master", "no-such-host.invalid")
    assert wrong.exit_code == 1 and "nothing leads to no-such-host.invalid" in wrong.stdout
    assert "1 to fix" in wrong.stdout
    if sys.platform == "linux":
        there = run("--json", MASTER_ADDR="127.0.0.1")
        assert {each["name"]: each for each in json.loads(there.stdout)}["interface"]["data"]["leads"] == "lo"
        assert there.exit_code == 0


def test_ranks_that_fail_are_said_in_a_line(monkeypatch):
    import shardlab.launch

    def broken(*_, **__):
        raise RankError("rank 1 of 2 was killed by SIGKILL\n\nTraceback", 1)

    monkeypatch.setattr(shardlab.launch, "ranks", broken)
    (check,) = doctor._ranks(["gloo"])
    assert (check.state, check.found) == ("fix", "rank 1 of 2 was killed by SIGKILL")
    assert "launch(print, 2)" in check.remedy


def test_a_link_that_is_missing_is_no_reason_to_stop():
    class Crew:
        def run(self, *_):
            raise RankError("rank 0 of 2 raised RuntimeError: no shared memory\n\nTraceback", 0)

    check = doctor._link("shm", Crew())
    assert check.state == "look" and "no shared memory" in check.found
