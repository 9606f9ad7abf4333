"""What `shardlab doctor` looks at, one function a subject: what was found, whether it will do, and what to change.

Each takes what it judges as an argument, so that a test can show it another machine.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..specs.units import binary

LEAST_PYTHON, LEAST_TORCH = (3, 11), (2, 9)  # of pyproject.toml
FEW_FILES, FEW_SHARED = 1024, 256 * 2**20  # open files, and bytes of /dev/shm, below which it gets tight
SHARED = Path("/dev/shm")


@dataclass(frozen=True)
class Check:
    """`state` is "ok", "look" (it works, but not for all, or not fast) or "fix"; `remedy` says what to do then, `data`
    is the plain data of what was `found`."""

    name: str
    state: str
    found: str
    remedy: str = ""
    data: dict[str, Any] = field(default_factory=dict)


def python(version: tuple[int, ...] = sys.version_info[:3], platform: str = sys.platform) -> Check:
    """The interpreter, and the system it runs on."""
    found = f"{'.'.join(map(str, version))} on {platform}"
    if version < LEAST_PYTHON:
        return Check("Python", "fix", found, f"install Python {'.'.join(map(str, LEAST_PYTHON))} or later")
    if platform == "win32":
        return Check("Python", "fix", found, "ranks are forked, which Windows can't do: use WSL")
    return Check("Python", "ok", found)


def torch_version(version: str) -> Check:
    """PyTorch's version, "2.13.0+cpu" for instance."""
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    old = numbers < LEAST_TORCH
    return Check("torch", "fix" if old else "ok", version,
                 f"pip install 'torch>={'.'.join(map(str, LEAST_TORCH))}'" * old)


def cores(there: int, mine: int, load: float) -> Check:
    """`there` are the machine's, `mine` those that this process may use; `load` is the average of a minute."""
    found = f"{mine} of {there}" * (mine < there) or f"{there}"
    found += f", load {load:.1f}"
    data = {"cores": there, "usable": mine, "load": load}
    if load > mine:
        return Check("cores", "look", found, "others keep them busy: what is measured now is theirs too", data)
    return Check("cores", "ok", found, data=data)


def shared_memory(nbytes: int | None) -> Check:
    """The size of /dev/shm, which NCCL and data loaders use inside a machine; None where there is none."""
    if nbytes is None:
        return Check("shared memory", "ok", "no /dev/shm on this system")
    small = nbytes < FEW_SHARED
    return Check("shared memory", "look" if small else "ok", f"{binary(nbytes, 3)} at /dev/shm", (
        "a container's default is too small for NCCL and data loaders: docker run --shm-size=8g (or --ipc=host); in "
        "Kubernetes an emptyDir of medium Memory at /dev/shm") * small, {"bytes": nbytes})


def open_files(limit: int) -> Check:
    """How many files a process may have open: every pair of ranks is a connection, every pipe two."""
    few = limit < FEW_FILES
    return Check("open files", "look" if few else "ok", f"{limit:,} a process", (
        f"many ranks need more: ulimit -n {FEW_FILES * 64}, or LimitNOFILE of the service") * few, {"limit": limit})


def hostname(name: str, address: str | None, addresses: Mapping[str, str]) -> Check:
    """What this machine's own `name` leads to: gloo gives other machines that address, unless it is told an interface.

    `address` is None where it leads nowhere; `addresses` are those of the interfaces, by name.
    """
    outside = [each for each, own in addresses.items() if not own.startswith("127.")]
    named = f"GLOO_SOCKET_IFNAME={outside[0] if outside else 'eth0'}"
    data = {"name": name, "address": address}
    if address is None:
        return Check("host name", "look", f"{name} leads nowhere", f"alone this does no harm, and shardlab finds the "
                     f"interface by itself; for other programs on several machines: export {named}, or a line for it "
                     "in /etc/hosts", data)
    if address.startswith("127."):
        return Check("host name", "look", f"{name} is {address}, where no other machine finds this one",
                     f"alone this does no harm, and shardlab finds the interface by itself; for other programs on "
                     f"several machines: export {named}, or its own address in /etc/hosts", data)
    return Check("host name", "ok", f"{name} is {address}", data=data)


def interfaces(addresses: Mapping[str, str], asked: str | None, master: str | None, leads: str | None) -> Check:
    """`asked` is GLOO_SOCKET_IFNAME, `master` the first rank's machine, if one is named, and `leads` the interface that
    leads there."""
    found = ", ".join(f"{name} {address}" for name, address in addresses.items()) or "none with an IPv4 address"
    data = {"addresses": dict(addresses), "asked": asked, "master": master, "leads": leads}
    if asked and addresses and not set(asked.split(",")) & set(addresses):
        return Check("interface", "fix", found, f"GLOO_SOCKET_IFNAME={asked} names none of them: unset it, or export "
                     f"{'one of ' * (len(addresses) > 1)}{', '.join(addresses)}", data)
    if master is None:
        return Check("interface", "ok", found + (f"; gloo is told {asked}" if asked else ""), data=data)
    if leads is None:
        return Check("interface", "fix", f"{found}; nothing leads to {master}",
                     f"see whether {master} is the first machine's name or address, and whether this one has a route "
                     "there", data)
    return Check("interface", "ok", f"{asked or leads} leads to {master}; there are {found}", data=data)


def gpus(names: list[str], nbytes: list[int], cuda: str | None, nccl: str | None, driver: bool, peers: bool) -> Check:
    """The GPUs' `names` and memories in bytes; what `cuda` and `nccl` PyTorch was built with; whether a `driver` is
    there, and whether the GPUs reach each other's memory (`peers`)."""
    data = {"names": names, "bytes": nbytes, "cuda": cuda, "nccl": nccl, "peers": peers}
    if not names:
        if driver:
            why = "this PyTorch is built without CUDA" if cuda is None else f"PyTorch's CUDA {cuda} can't use it"
            return Check("GPUs", "fix", f"a driver is there, but {why}",
                         "install the PyTorch that fits nvidia-smi's CUDA version: pytorch.org/get-started", data)
        return Check("GPUs", "ok", "none: ranks compute on the CPU, over gloo", data=data)
    found = f"{len(names)} × {names[0]}, {binary(nbytes[0], 3)}; CUDA {cuda}, NCCL {nccl}"
    if nccl is None:
        return Check("GPUs", "fix", found, "this PyTorch has no NCCL: install the one for Linux and CUDA", data)
    if len(names) > 1 and not peers:
        return Check("GPUs", "look", found + "; they do not reach each other's memory",
                     "between them messages go through the host: see nvidia-smi topo -m; in a virtual machine ACS or "
                     "IOMMU may be in the way", data)
    return Check("GPUs", "ok", found, data=data)


def shm_bytes() -> int | None:
    """The size of /dev/shm."""
    return shutil.disk_usage(SHARED).total if SHARED.is_dir() else None


def file_limit() -> int:
    """How many files this process may have open."""
    import resource  # which Windows has not

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def resolved(name: str) -> str | None:
    """The IPv4 address that a name leads to."""
    try:
        return socket.gethostbyname(name)
    except OSError:
        return None
