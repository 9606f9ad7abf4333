"""Which processes a launch has started, read from /proc, which only Linux has."""

from pathlib import Path

from shardlab.launch import run


def family():
    """Ids of this process's server and of all that it has forked: they share a session of their own."""
    server = run._server._process.pid
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == server and fields[0] != "Z":
            found.add(int(stat.parent.name))
    return found
