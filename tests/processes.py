"""Which processes a launch has started, read from /proc, which only Linux has."""

import time
from pathlib import Path

from shardlab.launch import run


def family():
    """Ids of all that this process's server has forked: they share its session."""
    server = run._server._process and run._server._process.pid
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == server and fields[0] != "Z":
            found.add(int(stat.parent.name))
    return found - {server}


def eventually(condition, seconds=5.0):
    """Whether `condition()` comes true within `seconds`."""
    deadline = time.monotonic() + seconds
    while not (good := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return good
