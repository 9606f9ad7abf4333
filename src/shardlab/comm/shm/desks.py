"""Desks: each rank has one in shared memory, lays its data on it, and reads the others'.

A desk has two slots, so that the next chunk can be laid down while the one before is still being read. Who has read a
slot says so, and before its owner uses it again it collects these words: whichever groups it is in, and however late
one of its readers is, nothing is overwritten that has yet to be read.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from ..disagreement import of_ranks
from .semaphore import Semaphore
from .waiting import Waiting

SLOTS = 2
NOTE = 512  # bytes in which the owner of a slot says what it is about to do
HEAD = struct.Struct("<Q16sH")  # a note's: chunks that the group had moved, digest of the whole text, bytes of it here

Stage = Callable[[int, int], None]  # stage(chunk, slot)


@dataclass(frozen=True)
class Desk:
    """A rank's slots, each `size` bytes for a chunk and then its note, by address; `read` is what readers post."""

    slots: tuple[int, ...]
    size: int
    read: tuple[Semaphore, ...]


class _Disagree(Exception):
    """The ranks do not do the same. All of them have been told, so they are in step for what comes next."""


class Desks:
    """The desks of all ranks, as `rank` uses them. By meet(a, b) rank a tells rank b that it is at a barrier."""

    def __init__(self, waiting: Waiting, rank: int, desks: Sequence[Desk], meet: Callable[[int, int], Semaphore]):
        self._waiting, self.rank, self._desks = waiting, rank, desks
        self._tell = [meet(rank, other) for other in range(len(desks))]
        self._told = [meet(other, rank) for other in range(len(desks))]
        self.size = desks[rank].size
        self._used: dict[tuple[int, ...], int] = {}  # chunks that a group has moved: its members agree on the next slot
        self._broken = ""  # what has put this rank out of step
        self._readers = [0] * SLOTS  # of each own slot: how many have yet to say that they are done

    def at(self, rank: int, slot: int) -> int:
        """The address of a slot of a rank's desk."""
        return self._desks[rank].slots[slot]

    def run(self, ranks: tuple[int, ...], text: str, chunks: int, *stages: Stage) -> None:
        """Pass the chunks, 1 or more, through the stages, of which there are 2 or 3. All ranks do the same.

        Each stage is a step behind the one before it, and between two steps is a barrier: what one stage has laid on a
        desk, the next finds there. What the third reads, the first must leave alone, two chunks on in the same slot.

        Raises ValueError on every rank alike where their texts differ, and RuntimeError once anything else has been
        raised in here: this rank is then out of step with the others, which may be waiting for it.
        """
        if self._broken:
            raise RuntimeError(f"this rank is out of step with the others in shared memory since {self._broken}: start "
                               "new ranks, or use the backend")
        try:
            self._pass(ranks, text, chunks, stages)
        except _Disagree as error:
            raise ValueError(*error.args) from None
        except BaseException as error:
            self._broken = f"{text}, where {type(error).__name__} was raised"
            raise

    def _pass(self, ranks: tuple[int, ...], text: str, chunks: int, stages: Sequence[Stage]) -> None:
        used = self._used.get(ranks, 0)
        steps = chunks + len(stages) - 1
        for step in range(steps):
            if step < chunks:
                self._collect((used + step) % SLOTS, text)
            if step == 0:
                note = self._write(used, text)
            for behind, stage in enumerate(stages):
                if 0 <= step - behind < chunks:
                    stage(step - behind, (used + step - behind) % SLOTS)
            if step < steps - 1:
                self._barrier(ranks, text)
            if step == 0:
                self._compare(ranks, used, note)
        self._release(ranks, used + chunks)

    def _collect(self, slot: int, text: str) -> None:
        """Wait until an own slot has been read by all who had to."""
        for _ in range(self._readers[slot]):
            self._waiting.acquire(self._desks[self.rank].read[slot], f"readers of what came before {text}")
        self._readers[slot] = 0

    def _release(self, ranks: tuple[int, ...], used: int) -> None:
        """Say that the slot used last has been read. The others have been before the last barrier."""
        self._used[ranks] = used
        slot = (used - 1) % SLOTS
        for rank in ranks:
            if rank != self.rank:
                self._waiting.post(self._desks[rank].read[slot], rank)
        self._readers[slot] += len(ranks) - 1

    def _barrier(self, ranks: tuple[int, ...], text: str) -> None:
        """By dissemination (Hensgen, Finkel, Manber 1988): after ⌈log2 p⌉ rounds everyone has heard of everyone."""
        p, place, distance = len(ranks), ranks.index(self.rank), 1
        while distance < p:
            to, source = ranks[(place + distance) % p], ranks[(place - distance) % p]
            self._waiting.post(self._tell[to], to)
            self._waiting.acquire(self._told[source], f"rank {source} in {text}")
            distance *= 2

    def _write(self, used: int, text: str) -> bytes:
        """Lay down the note: which of the group's chunks this is, so that no old note passes for it, and the text."""
        data = text.encode()
        note = HEAD.pack(used, blake2b(data, digest_size=16).digest(), len(data[: NOTE - HEAD.size]))
        note += data[: NOTE - HEAD.size]
        ctypes.memmove(self.at(self.rank, used % SLOTS) + self.size, note, len(note))
        return note

    def _compare(self, ranks: tuple[int, ...], used: int, note: bytes) -> None:
        """Raise where the ranks' notes differ."""
        notes = [self.at(rank, used % SLOTS) + self.size for rank in ranks]
        if all(ctypes.string_at(at, len(note)) == note for at in notes):
            return
        said = [ctypes.string_at(at, NOTE) for at in notes]
        self._release(ranks, used + 1)
        texts = {}
        for rank, data in zip(ranks, said, strict=True):
            number, _, length = HEAD.unpack_from(data)
            words = data[HEAD.size : HEAD.size + length].decode(errors="replace")
            texts[rank] = words + (f", at chunk {number} and not {used}" if number != used else "")
        raise _Disagree(of_ranks(texts))
