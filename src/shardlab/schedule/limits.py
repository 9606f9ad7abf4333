"""For which sizes a schedule is defined."""

from __future__ import annotations


def whole(**sizes: int) -> None:
    """Raise TypeError or ValueError unless all sizes are whole numbers of at least 1."""
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} must be a whole number, not {value!r}")
        if value < 1:
            raise ValueError(f"{name} = {value}: give at least 1")


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
