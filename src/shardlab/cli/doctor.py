"""`shardlab doctor`: whether ranks will run on this machine, and on several, and what to change where they will not."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from ..cost.fit import fit
from . import checks
from .bench import SIZES, half_round_trips
from .checks import Check
from .terminal import plain_table

COLOURS = {"ok": "green", "look": "yellow", "fix": "bold red"}
SOME, REPEATS = SIZES[:9], 5  # of `bench links`, up to 4 MiB: seconds, not minutes


def doctor(
    master: Annotated[str | None, typer.Option(
        help="The first rank's machine, by name or address; MASTER_ADDR if left out.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Plain data: a check each, with its state.")] = False,
) -> None:
    """Check this machine: ranks, backends, links, network, limits, GPUs. Exit code 1 says that something needs a fix.

    "look" is what works here, but not fast, or not on several machines.
    """
    found = list(examined(master or os.environ.get("MASTER_ADDR")))
    if as_json:
        print(json.dumps([asdict(each) for each in found], indent=2))
    else:
        _show(found)
    raise typer.Exit(int(any(each.state == "fix" for each in found)))


def examined(master: str | None = None) -> Iterator[Check]:
    """All checks, in the order in which one rests on the other."""
    yield checks.python()
    try:
        import torch
        import torch.distributed as dist

        from ..launch import interface
    except ImportError as error:
        yield Check("torch", "fix", str(error), "pip install torch")
        return
    yield checks.torch_version(torch.__version__)
    yield checks.cores(os.cpu_count() or 1, checks.usable_cores(), os.getloadavg()[0])
    yield checks.shared_memory(checks.shm_bytes())
    yield checks.open_files(checks.file_limit())
    addresses = interface.addresses()
    yield checks.hostname(socket.gethostname(), checks.resolved(socket.gethostname()), addresses)
    leads = None if master is None else interface.towards(master)
    yield checks.interfaces(addresses, os.environ.get("GLOO_SOCKET_IFNAME"), master, leads)
    count = torch.cuda.device_count()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if count and dist.is_nccl_available() else None
    yield checks.gpus([torch.cuda.get_device_name(i) for i in range(count)],
                      [torch.cuda.get_device_properties(i).total_memory for i in range(count)],
                      torch.version.cuda, nccl, Path("/proc/driver/nvidia").exists(),
                      count < 2 or torch.cuda.can_device_access_peer(0, 1))
    yield from _ranks(["gloo"] + ["nccl"] * (nccl is not None))


def _ranks(backends: list[str]) -> Iterator[Check]:
    """Whether ranks start and sum something, over each backend, and how fast messages are between two of them."""
    import torch

    from ..launch import RankError, ranks

    for backend in backends:
        size = 2 if backend == "gloo" else min(2, torch.cuda.device_count())
        try:
            with ranks(size, backend, timeout=60) as crew:
                total = set(crew.run(_sum, backend))
                if total != {size * (size + 1) / 2}:
                    yield Check(f"ranks, {backend}", "fix", f"their sum is {total}", "this is a fault: report it")
                    continue
                alone = " (more than one were not tried: there is one GPU)" * (size == 1)
                yield Check(f"ranks, {backend}", "ok", f"{size} started, and summed{alone}", data={"ranks": size})
                if backend == "gloo":
                    for transport in ("backend", "shm"):
                        yield _link(transport, crew)
        except (RankError, RuntimeError, ValueError, OSError) as error:
            yield Check(f"ranks, {backend}", "fix", str(error).splitlines()[0],
                        "see python -c 'from shardlab.launch import launch; launch(print, 2)' for all of it")


def _link(transport: str, crew) -> Check:
    name = {"backend": "link, gloo", "shm": "link, shm"}[transport]
    try:
        samples = crew.run(half_round_trips, transport, REPEATS, SOME)[0]
    except RuntimeError as error:
        return Check(name, "look", " ".join(str(error).splitlines()[0].split()), "the other transport does as well, "
                     "more slowly")
    fitted = fit(samples)
    return Check(name, "ok", f"α = {1e6 * fitted.alpha:.1f} µs a message, β = {fitted.beta / 1e9:.2f} GB/s",
                 data={"alpha": fitted.alpha, "beta": fitted.beta})


def _sum(group, backend: str) -> float:
    import torch

    from .. import comm

    mine = torch.tensor([group.rank() + 1.0], device="cuda" if backend == "nccl" else "cpu")
    return comm.all_reduce(mine, group=group).item()


def _show(found: list[Check]) -> None:
    console = Console(highlight=False)
    table = plain_table("", "what", "found")
    for each in found:
        text = Text(each.found)
        if each.remedy:
            text.append(f"\n→ {each.remedy}", style="dim")
        table.add_row(Text(each.state, style=COLOURS[each.state]), Text(each.name), text)
    console.print(table)
    fixes = sum(each.state == "fix" for each in found)
    console.print(Text(f"\n{fixes} to fix" if fixes else "\nRanks run here.", style="bold"))
