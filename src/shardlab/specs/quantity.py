"""Numbers with their unit, as data files give them: "80 GB", "3350 GB/s", "400 Gbit/s", "989 TFLOP/s", "0.6 µs"."""

from __future__ import annotations

import re
from fractions import Fraction

_PREFIXES = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_BYTES: dict[str, int | Fraction] = {f"{p}B": 1000**n for p, n in _PREFIXES.items()}
_SCALES: dict[str, dict[str, int | Fraction]] = {
    "B": _BYTES | {f"{p}iB": 1024**n for p, n in zip("KMGT", range(1, 5), strict=True)},
    "B/s": {f"{unit}/s": one for unit, one in _BYTES.items()}
           | {f"{p}bit/s": Fraction(1000**n, 8) for p, n in _PREFIXES.items()},
    "FLOP/s": {f"{p}FLOP/s": 1000**n for p, n in _PREFIXES.items()},
    "s": {"s": 1, "ms": Fraction(1, 10**3), "µs": Fraction(1, 10**6), "us": Fraction(1, 10**6),
          "ns": Fraction(1, 10**9)},
}
_EXAMPLES = {"B": "80 GB", "B/s": "450 GB/s", "FLOP/s": "989 TFLOP/s", "s": "0.6 µs"}


def quantity(key: str, text: object, unit: str) -> Fraction:
    """What `text` says in `unit` ("B", "B/s", "FLOP/s" or "s"), exactly: quantity("link", "400 Gbit/s", "B/s") is 5e10.

    A bare number is refused: GB and Gbit, one direction and both, have been mistaken for each other too often. Raises
    ValueError naming `key`, what it holds and the units it may have.
    """
    scales = _SCALES[unit]
    match = re.fullmatch(r"\s*(-?[\d,]*\.?\d+(?:e\d+)?)\s*(\S+)\s*", text) if isinstance(text, str) else None
    if not match or match[2] not in scales:
        raise ValueError(f"{key} = {text!r}: write a number and its unit, as in \"{_EXAMPLES[unit]}\"; the units are "
                         f"{', '.join(scales)}")
    return Fraction(match[1].replace(",", "")) * scales[match[2]]
