"""What a process holds: its tensors, found by a walk over all of Python's objects."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from ..specs.units import binary

MAPS = Path("/proc/self/maps")
SHOWN = 6  # groups in a report, the largest first


@dataclass(frozen=True)
class Group:
    """Tensors of one kind: how many, their dtype ("float32") and shape, and the bytes of all their storages."""

    count: int
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Resident:
    """What a rank holds of its card: the `budget`, what is `used` of it (both in bytes), and its tensors in groups.

    `str()` of it is a table. Tensors are those that Python can reach: what autograd alone keeps for backward is part of
    `used`, not of `groups`.
    """

    budget: int
    used: int
    groups: list[Group]

    @property
    def tensors(self) -> int:
        """Bytes of all tensors found."""
        return sum(group.nbytes for group in self.groups)

    @property
    def left(self) -> int:
        """Bytes of the budget that are not used."""
        return max(0, self.budget - self.used)

    def __str__(self) -> str:
        rows = [(group.nbytes, f"{group.count} × {group.dtype} {group.shape}") for group in self.groups[:SHOWN]]
        others = self.groups[SHOWN:]
        rows += [(sum(group.nbytes for group in others), f"{sum(group.count for group in others)} other tensors"),
                 (self.used - self.tensors, "not in tensors that Python can reach")]
        head = f"card of {binary(self.budget)}: {mebibytes(self.used)} used, {mebibytes(self.left)} left"
        width = max(len(mebibytes(nbytes)) for nbytes, _ in rows)
        return "\n".join([head, *(f"  {mebibytes(nbytes):>{width}}  {what}" for nbytes, what in rows
                                  if nbytes >= 0.005 * 2**20)])  # what would show as more than 0.00


def mebibytes(nbytes: int) -> str:
    """Bytes in MiB whatever their size, so that numbers in a column compare at a glance."""
    return f"{nbytes / 2**20:,.2f} MiB"


def groups(kind: str) -> list[Group]:
    """The tensors of this process on devices of `kind` ("cpu", "cuda"), by dtype and shape, largest group first.

    A storage is counted once, as the largest tensor on it. Views of mapped files and of shared memory are left out.
    """
    foreign = _shared_maps()
    largest: dict[int, torch.Tensor] = {}
    for tensor in _tensors():
        with suppress(RuntimeError, NotImplementedError):  # tensors without a storage: sparse, fake, wrapped
            where = tensor.untyped_storage().data_ptr()
            counts = tensor.device.type == kind and where and not any(where in span for span in foreign)
            if counts and (where not in largest or tensor.nbytes > largest[where].nbytes):
                largest[where] = tensor
    found: dict[tuple, list[int]] = defaultdict(list)
    for tensor in largest.values():
        found[str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)].append(tensor.untyped_storage().nbytes())
    made = [Group(len(sizes), dtype, shape, sum(sizes)) for (dtype, shape), sizes in found.items()]
    return sorted(made, key=lambda group: -group.nbytes)


def _tensors() -> Iterator[torch.Tensor]:
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor):  # isinstance would ask the object, which may be anything
            yield found
            if found.is_leaf and found.grad is not None:  # which Python may not have seen yet
                yield found.grad


def _shared_maps() -> list[range]:
    """Addresses of what this process has mapped to share it: weights in files, memory between processes."""
    lines = MAPS.read_text().splitlines() if MAPS.exists() else []
    spans = [line.split(maxsplit=2) for line in lines]
    return [range(*(int(end, 16) for end in span.split("-"))) for span, mode, _ in spans if mode.endswith("s")]
