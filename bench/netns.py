"""Two emulated nodes of two ranks each, joined by a link that is slow: gloo itself on Linux network namespaces.

A node is a network namespace. A veth pair joins the two, and the kernel's token bucket (`tc tbf`, rate only, no delay)
holds each direction to a rate. Inside a node traffic goes over the loopback. What the ledger says crosses the link is
compared with the interfaces' counters, which also count Ethernet, IP and TCP headers. Needs Linux, root and iproute2;
elsewhere it says what is missing and ends. Nothing stays: namespaces and ranks are removed on failure and Ctrl-C too.

    sudo .venv/bin/python bench/netns.py [--mbit 25] [--mib 4] [--repeats 3]    Mbit/s each direction, MiB a rank
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardlab import comm
from shardlab.cost import messages, transfer_seconds
from shardlab.specs import LinkSpec, Topology

NODES, PER_NODE, RANKS = 2, 2, 4
ADDRESSES = ("10.77.0.1", "10.77.0.2")  # they exist inside the namespaces only
MTU, HEADERS = 9000, 14 + 20 + 32  # bytes; Ethernet, IPv4 and TCP with timestamps, in each packet that is counted
LIMIT = 180  # seconds for each wait
WAYS = {"gloo's own": ("backend", "ring"), "ring": ("ring", "ring"), "two-level": ("two_level", "two_level")}


def place(mbit: float) -> Topology:
    """The two nodes, on a link of that rate."""
    return Topology(nodes=NODES, per_node=PER_NODE, between=LinkSpec(name="veth", per_direction=mbit * 1e6 / 8))


class Unavailable(Exception):
    """What this machine lacks."""


def require() -> None:
    """Raises Unavailable where this is not for this machine, or this user."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise Unavailable("network namespaces need Linux and root: sudo .venv/bin/python bench/netns.py")
    if not (shutil.which("ip") and shutil.which("tc")):
        raise Unavailable("needs ip and tc, which are in the package iproute2")


def build(names: list[str], mbit: float) -> None:
    """Make a namespace for each node and the link between them. Raises Unavailable where the kernel does not."""
    steps = [f"ip netns add {name}" for name in names]
    steps.append(f"ip -n {names[0]} link add net0 type veth peer name net0 netns {names[1]}")
    for name, address in zip(names, ADDRESSES, strict=True):
        steps += [f"ip -n {name} address add {address}/24 dev net0", f"ip -n {name} link set lo up",
                  f"ip -n {name} link set net0 mtu {MTU} gso_max_segs 1 up",  # packets are counted one by one
                  f"tc -n {name} qdisc add dev net0 root tbf rate {mbit}mbit burst 128kb latency 50ms"]
    for step in steps:
        done = subprocess.run(step.split(), capture_output=True, text=True)
        if done.returncode:
            raise Unavailable(f"this kernel, or this container, refuses {step}: {(done.stderr or done.stdout).strip()}")


def start(rank: int, names: list[str], port: str) -> subprocess.Popen:
    """A rank in its node's namespace. A session of its own: Ctrl-C is for this process, which ends the ranks."""
    environ = os.environ | {"GLOO_SOCKET_IFNAME": "net0", "NETNS_RANK": str(rank), "NETNS_PORT": port,
                            "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # it warns: no host names here
    return subprocess.Popen(["ip", "netns", "exec", names[rank // PER_NODE], sys.executable, *sys.argv], env=environ,
                            stdout=subprocess.PIPE, text=True, start_new_session=True)


def run(mbit: float) -> int:
    """Build, run the ranks, print what rank 0 says, and remove everything. The exit code."""
    require()
    names, ranks = [f"shardlab-{os.getpid()}-{node}" for node in range(NODES)], list[Any]()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    try:
        build(names, mbit)
        ranks.append(start(0, names, "0"))
        if port := ranks[0].stdout.readline().strip():  # rank 0 has the store, on a free port
            ranks += [start(rank, names, port) for rank in range(1, RANKS)]
            print(ranks[0].communicate(timeout=LIMIT)[0], end="")
        return max(abs(rank.wait(LIMIT)) for rank in ranks)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C would leave half of it behind
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.wait()
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL)  # it may not have been made


def join(rank: int, port: int) -> None:
    """Enter the group of all ranks through a store in rank 0, whose free port goes to the starting process."""
    store = dist.TCPStore(ADDRESSES[0], port, RANKS, rank == 0, timedelta(seconds=LIMIT), wait_for_workers=False)
    if rank == 0:
        print(store.port, flush=True)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)


def sent() -> torch.Tensor:
    """(bytes, packets) that this node's interface has sent."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if "net0:" in line)
    return torch.tensor([int(field) for field in line.split(":")[1].split()[8:10]])


def crossing(ledger: comm.Ledger) -> int:
    """Bytes that this rank sends to the other node; where no messages are known, a ring sends to the next rank."""
    def away(rank: int) -> bool:
        return rank // PER_NODE != dist.get_rank() // PER_NODE

    unknown = sum(e.wire for e in ledger.entries if not e.messages) * away((dist.get_rank() + 1) % RANKS)
    return round(unknown + sum(m.nbytes for e in ledger.entries for m in e.messages if away(m.dst)))


def measured(call: Callable[[], object], repeats: int) -> tuple[float, list[list[float]]]:
    """(median seconds of the slowest rank, [ledger's bytes, interface's bytes, its packets] for each node), a call."""
    call()  # connects
    comm.barrier()
    before, times = sent(), []
    comm.barrier()  # nobody sends before all have counted
    with comm.record() as ledger:
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    comm.barrier()
    counts = comm.all_gather(torch.tensor([crossing(ledger), *(sent() - before)])).view(NODES, PER_NODE, 3) / repeats
    nodes = torch.cat([counts[:, :, :1].sum(1), counts[:, 0, 1:]], 1)  # the interface is the node's, not the rank's
    return comm.all_reduce(torch.tensor(times), "max").median().item(), nodes.tolist()


def rate(peer: int, x: torch.Tensor, repeats: int) -> float:
    """Bytes a second from rank 0 to `peer`, answered by one element."""
    def there() -> None:
        for src, dst, what in ((0, peer, x), (peer, 0, x[:1])):
            if dist.get_rank() == src:
                comm.send(what, dst)
            elif dist.get_rank() == dst:
                comm.recv(what, src)

    return x.nbytes / measured(there, repeats)[0]


def all_reduce(algorithm: str, x: torch.Tensor) -> None:
    """Sum `x`. Two levels need a topology, to know who shares a node; its link slows nothing, the real one does."""
    with comm.use(algorithm, topology=place(1e9) if algorithm == "two_level" else None):
        comm.all_reduce(x)


def main(rank: int, mbit: float, mib: int, repeats: int) -> None:
    """What a rank does; rank 0 prints."""
    say = print if rank == 0 else lambda *_: None
    join(rank, int(os.environ["NETNS_PORT"]))
    clocks, x, took, cost = tempfile.NamedTemporaryFile(), torch.ones(mib << 18), {}, {}  # noqa: SIM115
    comm.links.open(clocks.name)  # which a topology wants
    say(f"send: inside a node {rate(1, x, repeats) / 1e6:,.0f} MB/s, across {rate(2, x, repeats) / 1e6:.2f} MB/s")
    say(f"\nall-reduce of {mib} MiB      s   cost s  node sends: ledger MB  interface MB    more  headers   rest")
    for name, (algorithm, model) in WAYS.items():
        took[name], nodes = measured(partial(all_reduce, algorithm, x), repeats)
        rounds = messages("all_reduce", model, x.numel(), x.itemsize, RANKS, per_node=PER_NODE)
        cost[name] = transfer_seconds(rounds, place(mbit))
        for node, (ledger, interface, packets) in enumerate(nodes):
            head, headers = "" if node else f"{name:16}{took[name]:9.3f}{cost[name]:9.3f}", packets * HEADERS
            say(f"{head:34}{node:6}{ledger / 1e6:17.3f}{interface / 1e6:14.3f}{interface / ledger - 1:8.2%}"
                f"{headers / ledger:9.2%}{(interface - headers) / ledger - 1:7.2%}")
    for flat in ("gloo's own", "ring"):
        say(f"{flat} ÷ two-level: {took[flat] / took['two-level']:.2f}, cost: {cost[flat] / cost['two-level']:.2f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for option, kind, default in (("--mbit", float, 25), ("--mib", int, 4), ("--repeats", int, 3)):
        parser.add_argument(option, type=kind, default=default)
    asked = parser.parse_args()
    if "NETNS_RANK" in os.environ:
        main(int(os.environ["NETNS_RANK"]), asked.mbit, asked.mib, asked.repeats)
    else:
        print(f"{NODES} nodes × {PER_NODE} ranks, {asked.mbit:g} Mbit/s each direction; torch {torch.__version__}, "
              f"kernel {os.uname().release}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
        try:
            sys.exit(run(asked.mbit))
        except Unavailable as missing:
            print(f"skipped: {missing}")
        except KeyboardInterrupt:
            sys.exit("interrupted: namespaces and ranks are removed")
