"""A card made of a process's own memory: RLIMIT_DATA of Linux, set to what the process uses plus the budget.

When a run begins, what the process uses but for its tensors is the zero from which the budget counts: PyTorch, the
process group, modules and messages cost nothing, and the tensors that a run before has left, or that come as
arguments, are on the card. From then on all counts that the process alone may write: tensors, Python's objects,
imports, the stacks of threads (1 MiB each; a new process group of gloo starts three). Files mapped for reading do not,
nor does memory shared with others.

Measured on x86-64 with glibc 2.36, on cards of 16 and 256 MiB: the largest tensor to be had is from 0.7 MiB less to
64 KiB more than the budget (Python takes up to 1 MiB at a time). To be that exact, the heap is kept to small things. A
tensor of 128 KiB or more is a mapping of its own, rounded up to whole pages of 4 KiB, and gives all of it back when it
is freed. Smaller ones share the heap with Python; its first MiB costs nothing, and what it has grown to serves small
ones again, but not always large ones.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import platform
from contextlib import suppress
from pathlib import Path

import torch

try:
    import resource
except ImportError:  # Windows has none
    resource = None  # type: ignore[assignment]

from .resident import groups

STATUS = Path("/proc/self/status")
LARGE = 2**17  # bytes from which on a block is a mapping of its own; glibc would raise this with every one freed
RESERVE = 2**20  # bytes of heap ahead of the limit: for Python, gloo, and an error that has to be put into words
STACK = 2**20  # bytes of address space for a new thread, of which it touches little; the usual 8 MiB would all count
SLACK = 2**16  # bytes over the budget: a tensor has a page of its own around it, and one of the budget's size fits
MALLOPT = {-8: 1, -3: LARGE, -1: RESERVE, -2: RESERVE}  # M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD


class Host:
    """This process as a card of `budget` bytes; made before it has threads, each of which would have its own heap.

    `missing` says why the process can't be limited; it is empty where it can.
    """

    kind = "cpu"

    def __init__(self, budget: int):
        self._budget, self._zero = budget, 0
        self.missing = self._missing()
        if not self.missing:
            for option, value in MALLOPT.items():
                self._libc.mallopt(option, value)

    def prepare(self) -> None:
        """Have PyTorch take what it keeps; find out whether the system limits a process."""
        if not self.missing:
            _warm_up()
            self.missing = "" if _obeys() else "this system takes a limit for a process, but does not keep it to that"

    def begin(self) -> None:
        """Set the zero. Memory that the heap has to spare is not part of it: the run's small tensors will take it."""
        gc.collect()
        spare = max(0, self._libc.mallinfo2().fordblks - RESERVE)
        self._zero = _data() - spare - sum(group.nbytes for group in groups(self.kind))

    def used(self) -> int:
        """Bytes used against the budget."""
        return _data() - self._zero

    def limit(self) -> None:
        self._before = resource.getrlimit(resource.RLIMIT_DATA)
        self._stack = self._stacks_of(STACK)
        resource.setrlimit(resource.RLIMIT_DATA, (self._zero + self._budget + SLACK, self._before[1]))

    def lift(self) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, self._before)
        self._stacks_of(self._stack)

    def _missing(self) -> str:
        if resource is None or not STATUS.exists():
            return f"{platform.system()} has no limit that PyTorch's memory would come up against"
        self._libc = ctypes.CDLL(None)
        if not hasattr(self._libc, "mallinfo2"):
            return "the C library of this Linux is no glibc, or one before 2.33"
        self._libc.mallinfo2.restype = _Heap
        return ""

    def _stacks_of(self, nbytes: int) -> int:
        """Give threads to come stacks of `nbytes`; returns what they would have had."""
        attributes, before = ctypes.create_string_buffer(128), ctypes.c_size_t()
        self._libc.pthread_getattr_default_np(attributes)
        self._libc.pthread_attr_getstacksize(attributes, ctypes.byref(before))
        self._libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(nbytes))
        self._libc.pthread_setattr_default_np(attributes)
        return before.value


class _Heap(ctypes.Structure):
    """What glibc says of its heap, in bytes; `fordblks` are free."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"))


def _data() -> int:
    """Bytes that RLIMIT_DATA is held against."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmData:"))
    return int(line.split()[1]) * 1024


def _warm_up() -> None:
    """Let PyTorch start its threads and take the buffers that it keeps; bring the heap to its reserve."""
    x = torch.ones(256, 256, requires_grad=True)
    (x @ x).softmax(0).sum().backward()
    with suppress(RuntimeError):  # C++ makes room for its errors when the first is thrown: not when there is none left
        torch.empty(2**60, dtype=torch.uint8)
    small = [torch.empty(LARGE // 2, dtype=torch.uint8) for _ in range(2 * RESERVE // LARGE)]
    del x, small
    gc.collect()


def _obeys() -> bool:
    """Whether memory past RLIMIT_DATA is refused: found out by asking for it."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_data(), before[1]))
    try:
        mmap.mmap(-1, 2**24, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError as error:
        return error.errno == errno.ENOMEM
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    return False
