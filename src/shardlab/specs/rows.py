"""Numbers laid out one behind the other in rows, which travel as one and are cut evenly: the rule, without the numbers.

`parallel.flat` lays tensors out by it, `cost` predicts by it. A row is padded to a multiple of the p ranks that share
it; slice r is its r-th p-th. Where a tensor ends has nothing to do with where a slice ends: a slice may hold parts of
several tensors, or padding only.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from .tensor import padded

BUCKET = 25 * 2**20  # bytes of a row of gradients; PyTorch's DDP takes as many


@dataclass(frozen=True, eq=False)
class FlatRow:
    """Tensors of `sizes` numbers, in this order, over `p` ranks."""

    sizes: tuple[int, ...]
    p: int = 1

    @property
    def filled(self) -> int:
        """Numbers without the padding."""
        return sum(self.sizes)

    @cached_property
    def numel(self) -> int:
        """Numbers with the padding."""
        return padded(self.filled, self.p)

    @property
    def share(self) -> int:
        """Numbers of a slice, padding included."""
        return self.numel // self.p

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each tensor starts."""
        return tuple(accumulate(self.sizes[:-1], initial=0)) if self.sizes else ()

    def held(self, r: int) -> int:
        """Numbers of slice `r` that are no padding."""
        return min(max(self.filled - r * self.share, 0), self.share)

    def slices(self, r: int) -> Iterator[tuple[int, int, int]]:
        """What slice `r` holds: (i, first, last) for the numbers first to last of tensor i, in their order."""
        for i, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            first = min(max(r * self.share - start, 0), size)
            last = min(max((r + 1) * self.share - start, 0), size)
            if first < last:
                yield i, first, last


def rows_of(tensors: Iterable[tuple[Hashable, int]], nbytes: int) -> list[list[int]]:
    """Which tensors share a row: (kind, bytes) of each → the numbers of those in each row.

    In their order, of one kind (dtype and device) a row, of `nbytes` at most or a single tensor.
    """
    out: list[list[int]] = []
    last: Hashable = None
    size = 0
    for i, (kind, its) in enumerate(tensors):
        if not out or kind != last or size + its > nbytes:
            out.append([])
            size = 0
        out[-1].append(i)
        last, size = kind, size + its
    return out
