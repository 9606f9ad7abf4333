"""Room for the backend's own threads, where a process's memory is limited, as on a `card`.

A thread of gloo's that gets no memory ends the process: nobody is there to catch its error. So the caller asks first.
"""

from __future__ import annotations

import mmap

try:
    import resource
except ImportError:  # no limits there
    resource = None  # type: ignore[assignment]

ROOM = 2**21  # bytes: where its heap cannot grow, malloc asks the system for a whole MiB


def ask(verb: str) -> None:
    """Raise MemoryError where this process's limit leaves less than `ROOM` for what `verb` needs besides tensors."""
    if resource is None or resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY:
        return
    try:
        mmap.mmap(-1, ROOM, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError:
        raise MemoryError(f"{verb} needs up to {ROOM // 2**20} MiB besides its tensors, and there is no room") from None
