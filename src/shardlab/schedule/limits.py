"""For which sizes each schedule is defined: known before any list is made."""

from __future__ import annotations


def whole(**sizes: int) -> None:
    """Raise TypeError or ValueError unless all sizes are whole numbers of at least 1."""
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} must be a whole number, not {value!r}")
        if value < 1:
            raise ValueError(f"{name} = {value}: give at least 1")


def sized(name: str, ranks: int, microbatches: int, chunks: int = 1) -> None:
    """Raise TypeError or ValueError where the schedule of that name is not defined, naming sizes near by that are.

    `chunks` is the number of stages on each rank.
    """
    whole(ranks=ranks, microbatches=microbatches, chunks=chunks)
    if name == "interleaved":
        multiple("microbatches", microbatches, ranks, "the number of ranks, which interleaved 1F1B works in rounds of")
    elif name == "dualpipe_v":
        at_least("microbatches", microbatches, 2 * ranks, "two for each rank, with which DualPipeV fills")
    elif name == "dualpipe":
        multiple("ranks", ranks, 2, "and DualPipe's are in pairs")
        at_least("microbatches", microbatches, 2 * ranks, "two for each rank, with which DualPipe fills")
        multiple("microbatches", microbatches, 2, "and DualPipe sends half from each end")


def multiple(name: str, value: int, of: int, why: str) -> None:
    """Raise ValueError unless `of` divides the value, naming the nearest values that it divides."""
    if value % of:
        below = value // of * of
        near = f"{below} or {below + of}" if below else f"{of}"
        raise ValueError(f"{name} = {value} is no multiple of {of}, {why}: take {near}")


def at_least(name: str, value: int, least: int, why: str) -> None:
    """Raise ValueError unless the value is `least` or more."""
    if value < least:
        raise ValueError(f"{name} = {value} is below {least}, {why}: take {least} or more")
