"""Several machines on one: a torchrun agent for each, and all of its processes gone at the end, whatever happens."""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).parent.parent
MARK = "SHARDLAB_TEST_NODES"  # in the environment of all that is started, for it to be found again


def netns():
    """bench/netns.py, which builds two namespaces and the link between them."""
    spec = importlib.util.spec_from_file_location("netns", ROOT / "bench" / "netns.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def unwinding():
    """In the block SIGTERM ends this process as an error would, so that nothing is left behind."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(per_node, arguments, nodes=2, address="127.0.0.1", inside=(), limit=240, env=None):
    """What each node's torchrun agent ended with, (exit code, what it printed), and whatever was left then, by id.

    `arguments` of `shardlab`, a list for each node; `inside[node]` is the command that the agent is run by.
    """
    token, port = uuid.uuid4().hex, str(free_port())
    environ = {**os.environ, MARK: token, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), **(env or {})}
    agents, undo = [], ExitStack()
    undo.enter_context(unwinding())
    try:
        for node in range(nodes):
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes), "--node-rank", str(node),
                       "--nproc-per-node", str(per_node), "--master-addr", address, "--master-port", port,
                       "-m", "shardlab.cli", *map(str, arguments[node])]
            agents.append(subprocess.Popen([*(inside[node] if inside else ()), *command], env=environ, text=True,
                                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True))
        deadline = time.monotonic() + limit
        said = [agent.communicate(timeout=max(1, deadline - time.monotonic()))[0] for agent in agents]
        return [(agent.returncode, text) for agent, text in zip(agents, said, strict=True)], marked(token)
    finally:
        for pid in marked(token):  # torchrun's processes have sessions of their own
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for agent in agents:
            agent.wait()
            agent.stdout.close()
        undo.close()


def marked(token):
    """The ids of processes with the token in their environment that have not ended."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            alive = process.joinpath("stat").read_text().rpartition(")")[2].split()[0] != "Z"
            if alive and f"{MARK}={token}".encode() in process.joinpath("environ").read_bytes():
                found.append(int(process.name))
    return found


@contextmanager
def joined(mbit):
    """Two namespaces joined by a link of so many Mbit/s each way: their names, and the command that runs in each.

    Raises netns.Unavailable where this machine, or this user, has none.
    """
    module = netns()
    module.require()
    names = [f"shardlab-{os.getpid()}-{uuid.uuid4().hex[:6]}-{node}" for node in range(module.NODES)]
    with unwinding(), ExitStack() as undo:
        for name in names:
            undo.callback(subprocess.run, ["ip", "netns", "delete", name], stderr=subprocess.DEVNULL)
        module.build(names, mbit)
        yield names, [["ip", "netns", "exec", name] for name in names], module.ADDRESSES[0]


def namespaces():
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


def sent(name):
    """Bytes that the node's interface has sent."""
    text = subprocess.run(["ip", "netns", "exec", name, "cat", "/proc/net/dev"], capture_output=True, text=True).stdout
    return int(next(line for line in text.splitlines() if "net0:" in line).split(":")[1].split()[8])
