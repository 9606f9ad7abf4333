"""The checks that every size given to the library passes first."""

from __future__ import annotations

from numbers import Integral, Real


def whole(name: str, value: object, least: int = 1) -> int:
    """`value` if it is a whole number of at least `least`; ValueError naming both if not (True is not a 1)."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:  # numpy's among them
        raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")
    return int(value)


def number(name: str, value: object) -> float:
    """`value` as a float if it is a finite number above 0; ValueError naming both if not."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < float("inf"):
        raise ValueError(f"{name} must be a number above 0, not {value!r}")
    return float(value)


def amount(name: str, value: object) -> float:
    """`value` as a float if it is a finite number, 0 or above; ValueError naming both if not."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < float("inf"):
        raise ValueError(f"{name} must be a number of 0 or above, not {value!r}")
    return float(value)


def flag(name: str, value: object) -> bool:
    """`value` if it is True or False; ValueError naming both if not."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, not {value!r}")
    return value


def recompute_mode(value: object) -> str | None:
    """`value` if it says what backward computes again: None, "selective" or "full"; ValueError naming them if not."""
    if value is not None and value not in ("selective", "full"):
        raise ValueError(f"recompute must be None, 'selective' or 'full', not {value!r}")
    return value  # type: ignore[return-value]
