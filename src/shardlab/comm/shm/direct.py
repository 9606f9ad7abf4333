"""Collectives that read and write the ranks' desks directly, without messages.

Tensors that several ranks combine are combined in the order of the ranks, each element by one rank, or by all in the
same way: every rank gets the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .channels import copy
from .desks import Desks

SMALL = 2**14  # bytes up to which each rank combines everything itself, which saves a barrier
LINE = 64  # elements: a multiple of it begins at a cache line, whatever the dtype

Combine = Callable[[torch.Tensor, torch.Tensor], object]  # combine(into, other)
Ranks = tuple[int, ...]


class Direct:
    """The collectives of one rank; `view(address, count, dtype)` is a tensor in shared memory. See `Shared`."""

    def __init__(self, desks: Desks, view: Callable[[int, int, torch.dtype], torch.Tensor]):
        self._desks, self._rank, self._view = desks, desks.rank, view

    def all_reduce(self, x: torch.Tensor, combine: Combine, ranks: Ranks, text: str) -> int:
        x = x.view(-1)
        if len(ranks) == 1:
            return 0
        n, item, here, place = len(x), x.element_size(), x.data_ptr(), ranks.index(self._rank)
        if n * item <= SMALL:
            return self._all_reduce_small(x, combine, ranks, text)
        chunks, most = _chunks(n, self._desks.size // item)
        share = -(-most // len(ranks) // LINE) * LINE  # elements of a chunk that one rank combines

        def part(chunk: int, place: int) -> tuple[int, int, int]:
            """Where the chunk begins in x, where the share of the rank at `place` begins in the chunk, and ends."""
            size = min(most, n - chunk * most)
            return chunk * most, min(size, place * share), min(size, (place + 1) * share)

        def put(chunk: int, slot: int) -> None:  # not the own share: in its place are sums, two chunks older, to take
            start, first, last = part(chunk, place)
            desk, source, size = self._desks.at(self._rank, slot), here + start * item, min(most, n - start)
            copy(desk, source, first * item)
            copy(desk + last * item, source + last * item, (size - last) * item)

        def reduce(chunk: int, slot: int) -> None:
            start, first, last = part(chunk, place)
            if first < last:
                desk, own = self._desks.at(self._rank, slot) + first * item, x[start + first : start + last]
                if place < 2:  # the sum can begin with the own part: a + b is b + a
                    for other in [rank for rank in ranks if rank != self._rank]:
                        combine(own, self._view(self._desks.at(other, slot) + first * item, last - first, x.dtype))
                    copy(desk, own.data_ptr(), (last - first) * item)
                else:
                    total = self._view(desk, last - first, x.dtype)
                    self._combine(total, own, combine, ranks, slot, first * item)

        def take(chunk: int, slot: int) -> None:
            for i, rank in enumerate(ranks):
                if i != place or place >= 2:
                    start, first, last = part(chunk, i)
                    copy(here + (start + first) * item, self._desks.at(rank, slot) + first * item,
                         (last - first) * item)

        self._desks.run(ranks, text, chunks, put, reduce, take)
        return n * item

    def _all_reduce_small(self, x: torch.Tensor, combine: Combine, ranks: Ranks, text: str) -> int:
        nbytes = x.numel() * x.element_size()

        def put(chunk: int, slot: int) -> None:
            copy(self._desks.at(self._rank, slot), x.data_ptr(), nbytes)

        def reduce(chunk: int, slot: int) -> None:
            if nbytes:
                own = self._view(self._desks.at(self._rank, slot), len(x), x.dtype)
                self._combine(x, own, combine, ranks, slot, 0)

        self._desks.run(ranks, text, 1, put, reduce)
        return nbytes

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, combine: Combine, ranks: Ranks, text: str) -> int:
        x, out = x.view(-1), out.view(-1)
        p, n, item, place = len(ranks), len(out), x.element_size(), ranks.index(self._rank)
        chunks, most = _chunks(n, self._desks.size // item // p)

        def put(chunk: int, slot: int) -> None:
            start = chunk * most
            for i in range(p):
                if i != place:
                    copy(self._desks.at(self._rank, slot) + i * most * item, x.data_ptr() + (i * n + start) * item,
                         min(most, n - start) * item)

        def reduce(chunk: int, slot: int) -> None:
            start, end = chunk * most, min(n, (chunk + 1) * most)
            if start < end:
                own, offset = x[place * n + start : place * n + end], place * most * item
                total = out[start:end]
                if total.data_ptr() == own.data_ptr() and place >= 2:  # the sum begins with others: beside the own part
                    total = self._view(self._desks.at(self._rank, slot) + offset, end - start, x.dtype)
                self._combine(total, own, combine, ranks, slot, offset)
                if total.data_ptr() != out[start:end].data_ptr():
                    copy(out[start:end].data_ptr(), total.data_ptr(), (end - start) * item)

        self._desks.run(ranks, text, chunks, put, reduce)
        return (p - 1) * n * item

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, ranks: Ranks, text: str) -> int:
        nbytes = x.numel() * x.element_size()
        chunks, size = _chunks(nbytes, self._desks.size)
        if len(ranks) == 1:
            copy(out.data_ptr(), x.data_ptr(), nbytes)
            return 0

        def put(chunk: int, slot: int) -> None:
            copy(self._desks.at(self._rank, slot), x.data_ptr() + chunk * size, min(size, nbytes - chunk * size))

        def take(chunk: int, slot: int) -> None:
            for i, rank in enumerate(ranks):
                source = x.data_ptr() + chunk * size if rank == self._rank else self._desks.at(rank, slot)
                to = out.data_ptr() + i * nbytes + chunk * size
                if to != source:
                    copy(to, source, min(size, nbytes - chunk * size))

        self._desks.run(ranks, text, chunks, put, take)
        return nbytes

    def broadcast(self, x: torch.Tensor, src: int, ranks: Ranks, text: str) -> int:
        nbytes, root = x.numel() * x.element_size(), self._rank == src
        chunks, size = _chunks(nbytes, self._desks.size)
        if len(ranks) == 1:
            return 0

        def put(chunk: int, slot: int) -> None:
            if root:
                copy(self._desks.at(src, slot), x.data_ptr() + chunk * size, min(size, nbytes - chunk * size))

        def take(chunk: int, slot: int) -> None:
            if not root:
                copy(x.data_ptr() + chunk * size, self._desks.at(src, slot), min(size, nbytes - chunk * size))

        self._desks.run(ranks, text, chunks, put, take)
        return nbytes if root else 0

    def barrier(self, ranks: Ranks, text: str) -> int:
        def nothing(chunk: int, slot: int) -> None:
            pass

        self._desks.run(ranks, text, 1, nothing, nothing)
        return 0

    def _combine(self, total: torch.Tensor, own: torch.Tensor, combine: Combine, ranks: Ranks, slot: int,
                 offset: int) -> None:
        """Combine what lies `offset` bytes into the ranks' slots, and `own` for this rank's, into `total`, which may be
        `own` on the first two ranks: the sum can begin with their part, a + b being b + a."""
        if total.data_ptr() == own.data_ptr():
            for other in [rank for rank in ranks if rank != self._rank]:
                combine(total, self._view(self._desks.at(other, slot) + offset, len(total), total.dtype))
            return
        for i, rank in enumerate(ranks):
            part = own
            if rank != self._rank:
                part = self._view(self._desks.at(rank, slot) + offset, len(total), total.dtype)
            if i:
                combine(total, part)
            else:
                copy(total.data_ptr(), part.data_ptr(), len(total) * total.element_size())


def _chunks(n: int, room: int) -> tuple[int, int]:
    """How many chunks, 1 or more, n elements need where one takes `room`, and how long each of them but the last is."""
    most = room // LINE * LINE
    size = max(LINE, -(-n // max(1, -(-n // most)) // LINE) * LINE)  # as even as lines allow
    return max(1, -(-n // size)), size
