"""`shardlab train` on several machines, played by torchrun agents on this one: the single process's losses."""

import math
import os
import shutil
import sys

import nodes
import pytest

from shardlab.cli.train import spec_from
from shardlab.launch import interface
from shardlab.train import log
from shardlab.train.job import Job, run

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
pytestmark = linux
RUN = ["--model", "tiny", "--dtype", "fp64", "--batch", 4, "--seq", 32, "--steps", 20, "--warmup", 2, "--lr", 0.01]


@pytest.fixture(scope="module")
def alone():
    """The losses and norms of the plain run, in this process."""
    job = Job(spec=spec_from("tiny"), dtype="fp64", batch=4, seq=32, steps=20, warmup=2, lr=0.01)
    return [(step.loss, step.norm) for step in run(None, job)]


def trained(tmp_path, alone, layout, per_node, **more):
    """Train on two nodes: what they printed, after the log was seen to be the plain run's."""
    path = tmp_path / "log"
    arguments = ["train", "--layout", layout, "--log-file", path, "--timeout", 120, *RUN]
    done, left = nodes.run(per_node, [arguments] * 2, **more)
    assert [code for code, _ in done] == [0, 0], "\n".join(text for _, text in done)
    lines = log.read(path)
    assert [line["step"] for line in lines] == list(range(20))
    for line, (loss, norm) in zip(lines, alone, strict=True):
        assert math.isclose(line["loss"], loss, rel_tol=1e-9) and math.isclose(line["norm"], norm, rel_tol=1e-8), line
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5 and not left
    return [text for _, text in done]


def test_two_agents_on_one_machine_train_as_one_process(tmp_path, alone):
    first, second = trained(tmp_path, alone, "pp=2,microbatches=2", 1)
    assert "20 steps of pp = 2, 1f1b, 2,560 tokens: loss" in first and "steps of" not in second
    assert "tokens/s" in first and "tokens/s" not in second


@pytest.mark.more
def test_two_agents_with_two_ranks_each(tmp_path, alone):
    trained(tmp_path, alone, "dp=2,tp=2,zero=1,sp=keep,microbatches=2", 2)


@pytest.mark.more
def test_a_node_that_fails_ends_the_other_and_nothing_is_left(tmp_path):
    (tmp_path / "text").write_bytes(b"some text " * 100)
    there, gone = (["train", "--layout", "dp=2", "--timeout", 20, *RUN, "--text", tmp_path / name]
                   for name in ("text", "gone"))
    done, left = nodes.run(1, [there, gone], limit=180)
    assert all(code for code, _ in done) and not left
    assert "No such file or directory" in done[1][1]


@pytest.mark.more
def test_two_namespaces_joined_by_a_slow_link_train_as_one_process(tmp_path, alone):
    """Each node has its own network, in which this host's name leads nowhere: the interface has to be found."""
    before = nodes.namespaces() if shutil.which("ip") else ""
    try:
        with nodes.joined(mbit=50) as (names, inside, address):
            trained(tmp_path, alone, "pp=2,tp=2,schedule=gpipe,microbatches=2", 2, address=address, inside=inside,
                    env={"TORCH_CPP_LOG_LEVEL": "ERROR"})  # it warns that the address has no name
            assert min(map(nodes.sent, names)) > 20 * 2 * 2 * 32 * 48 * 8  # steps × parts × (2, 32, 48) float64
    except Exception as missing:
        if type(missing).__name__ != "Unavailable":
            raise
        assert not os.environ.get("CI"), f"CI is to run this: {missing}"
        pytest.skip(str(missing))
    assert nodes.namespaces() == before


def test_the_interface_to_the_loopback_is_the_loopback_and_to_nowhere_is_none():
    assert interface.towards("127.0.0.1") == interface.named("127.0.0.2") == "lo"
    assert interface.towards("no-such-host.invalid") is None and interface.named("203.0.113.7") is None
    for name, address in interface.addresses().items():
        assert interface.towards(address) == name
