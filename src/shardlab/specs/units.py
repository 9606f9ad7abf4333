"""Numbers with units, as bills and pages print them.

GB is 10^9 bytes and GiB 2^30, never one written as the other. A number is rounded to the digits shown, and drops
trailing zeros only where it is exact: "512 KiB" is 524,288 bytes, "512.00 KiB" nearly so.
"""

from __future__ import annotations

import re
from fractions import Fraction

_DECIMAL = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}
_BINARY = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SECONDS = {"ns": Fraction(1, 10**9), "µs": Fraction(1, 10**6), "ms": Fraction(1, 1000), "s": Fraction(1)}


def decimal(nbytes: float, digits: int = 5) -> str:
    """Bytes in B, kB, MB or GB: `decimal(524288)` is "524.29 kB"."""
    return _scaled(nbytes, _DECIMAL, digits, least=1)


def binary(nbytes: float, digits: int = 5) -> str:
    """Bytes in B, KiB, MiB or GiB: `binary(524288)` is "512 KiB"."""
    return _scaled(nbytes, _BINARY, digits, least=1)


def size(nbytes: int, digits: int = 5) -> str:
    """Bytes in full and in both kinds of unit: "524,288 B = 512 KiB = 524.29 kB"."""
    return " = ".join(dict.fromkeys((f"{nbytes:,} B", binary(nbytes, digits), decimal(nbytes, digits))))


def count(n: int, digits: int = 5) -> str:
    """A number of things: in full below 10^9 ("134,515,008"), in thousand millions from there ("671.03e9")."""
    return f"{n:,}" if n < 10**9 else _text(Fraction(n, 10**9), digits, 1) + "e9"


def seconds(t: float, digits: int = 3) -> str:
    """A time in ns, µs, ms or s: `seconds(1.25e-4)` is "125 µs". Times are estimates: three digits say enough."""
    return _scaled(Fraction(str(t)), _SECONDS, digits, least=0)  # as written: 1e-6 is not its nearest binary number


def parse_bytes(text: str) -> int:
    """The bytes that "256 MiB", "80 GB" or "1,024 B" means, to the nearest; ValueError on anything else."""
    units = _DECIMAL | _BINARY
    match = re.fullmatch(r"\s*([\d,]*\.?\d+)\s*(\w+)\s*", text) if isinstance(text, str) else None
    if not match or match[2] not in units:
        raise ValueError(f"{text!r} is no size: write a number and one of {', '.join(units)}, as in '256 MiB'")
    return round(Fraction(match[1].replace(",", "")) * units[match[2]])


def _scaled(value, units: dict, digits: int, least: int) -> str:
    """`value` in the largest of `units` that leaves at least 1 after rounding; in the smallest if none does."""
    exact = Fraction(value)
    name, one = next(iter(units.items()))
    for larger, scale in units.items():
        if round(exact / scale, _places(exact / scale, digits, least)) >= 1:
            name, one = larger, scale
    return f"{_text(exact / one, digits, least)} {name}"


def _places(value: Fraction, digits: int, least: int) -> int:
    """Places after the point that show `digits` digits in all, and at least `least` places."""
    return max(least, digits - len(str(int(value))))


def _text(value: Fraction, digits: int, least: int) -> str:
    places = _places(value, digits, least)
    rounded = round(value, places)
    text = f"{float(rounded):.{places}f}"
    return text.rstrip("0").rstrip(".") if places and rounded == value else text
