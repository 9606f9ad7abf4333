"""A limit on what a rank holds, while its function runs; an error for want of memory says what was held."""

from __future__ import annotations

import os
import re

import torch

from ..specs.units import binary, parse_bytes, size
from .gpu import Gpu
from .host import Host
from .resident import Resident, groups, mebibytes

LEAST = 2**20  # bytes; Python itself wants some to run a function
OUT_OF_MEMORY = re.compile(r"can(no|')t allocate memory|bad_alloc|CUDA out of memory|can't start new thread|"
                           r"Resource temporarily unavailable", re.IGNORECASE)
REMEDY = "To make it fit: fewer bits a number, a cut over more ranks, or a larger card."


class UnlimitedWarning(RuntimeWarning):
    """Ranks that were asked to run on a card run without one."""


class Limit:
    """A card of `budget` bytes for this process: `prepare()` once, then `with limit:` around each run of a function.

    Tensors that one run leaves behind are on the card in the next. With `gpu` the card is the process's current GPU,
    else its own memory. Made before the process has threads.
    """

    def __init__(self, budget: int, gpu: bool = False):
        self.budget = budget
        self._device = Gpu(budget) if gpu else Host(budget)

    @property
    def missing(self) -> str:
        """Why there is no limit, as half a sentence; empty where there is one. Known once it is prepared."""
        return self._device.missing

    def prepare(self) -> None:
        """Get the process ready; ValueError where its GPU has less memory than the budget."""
        self._device.prepare()

    def __enter__(self) -> Limit:
        if not self.missing:
            self._device.begin()
            self._device.limit()
        _entered.append(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        _entered.remove(self)
        if not self.missing:
            self._device.lift()
            if (cause := _out_of_memory(error)) is not None:
                cause.add_note(_report(cause, self._held()))

    def resident(self) -> Resident:
        """What the process holds, inside `with`. The limit is off meanwhile, for there may be no room to count in."""
        if self.missing:
            return self._held()
        self._device.lift()
        try:
            return self._held()
        finally:
            self._device.limit()

    def _held(self) -> Resident:
        used = None if self.missing else max(0, self._device.used())
        tensors = groups(self._device.kind)
        return Resident(self.budget, sum(group.nbytes for group in tensors) if used is None else used, tensors)


_entered: list[Limit] = []  # at most one: of the process, which is the rank


def resident() -> Resident:
    """What this rank holds of its card: `print(card.resident())` is a table, its fields are bytes.

    Raises ValueError where the rank has no card.
    """
    if not _entered:
        raise ValueError("card.resident() is for a function that ranks run with a card: launch(fn, 2, card='256 MiB')")
    return _entered[-1].resident()


def budget(card: object) -> int | None:
    """The bytes that `card=` asks for: a size ("256 MiB"), bytes, or what has `.memory` in bytes; None of None.

    Raises TypeError on anything else, ValueError on a size that can't be read or is below 1 MiB.
    """
    if card is None:
        return None
    nbytes = parse_bytes(card) if isinstance(card, str) else getattr(card, "memory", card)
    if not isinstance(nbytes, int) or isinstance(nbytes, bool):
        raise TypeError(f"card must be a size, bytes, or a CardSpec, not {card!r}: card='256 MiB'")
    if nbytes < LEAST:
        raise ValueError(f"a card of {nbytes:,} B has no room for a function to run in: give at least {size(LEAST)}")
    return nbytes


def check_machine(nbytes: int) -> None:
    """ValueError where this machine has less memory than one card: it would end before the card does.

    The system would then kill the rank, instead of an error that says what it held.
    """
    names = ("SC_PAGE_SIZE", "SC_PHYS_PAGES")
    if not hasattr(os, "sysconf") or not all(name in os.sysconf_names for name in names):
        return
    page, pages = map(os.sysconf, names)
    if nbytes > page * pages:
        raise ValueError(f"a card of {binary(nbytes)} can't be had from a machine of {binary(page * pages)}, "
                         "whose own memory would end first: give a smaller card, or find out with cost.memory")


def _out_of_memory(error: BaseException | None) -> BaseException | None:
    """The error for want of memory among `error` and what led to it, if there is one."""
    while error is not None:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or _says_so(error):
            return error
        error = error.__cause__ or error.__context__
    return None


def _report(error: BaseException, held: Resident) -> str:
    asked = re.search(r"tried to allocate (\d+) bytes", str(error))
    more = f"{mebibytes(int(asked[1]))} more asked for. " if asked else ""
    if asked and int(asked[1]) <= held.left:  # what an expression held that never came to its end
        more += "Some has been freed since. "
    return f"\n{more}This rank's {held}\n{REMEDY}"


def _says_so(error: BaseException) -> bool:
    try:
        return OUT_OF_MEMORY.search(str(error)) is not None
    except Exception:  # an error that can't even say what it is
        return False
