"""How a computed number is written: `write(16384, "KiB")` is "16 KiB", with a space that doesn't break.

A format is one word. Four digits are shown, or those before the point if there are more; trailing zeros are dropped
only where the number is exact, so that "17.60 GB" says where the rounding was.

    B kB MB GB TB KiB MiB GiB TiB    bytes in that unit             GB/s Gbit/s TFLOP/s …   the same, a second
    decimal binary size              bytes in the unit that fits, of ten, of two, or both and in full
    s                                seconds in ns, µs, ms or s, the unit that fits, to three digits
    us ms minutes hours days years   seconds in that unit; a year has 365.25 days
    count million billion            a number of things, whole
    ratio %                          7.9× and 85%, of 7.9 and 0.85
    number text                      a number without a unit; anything as Python prints it
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from shardlab.specs import units

NO_BREAK = "\u00a0"
BYTES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15,
         "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
WORK = {f"{prefix}FLOP": 1000**i for i, prefix in enumerate(("", "k", "M", "G", "T", "P", "E"))}
RATES = {f"{unit}/s": one for unit, one in {**BYTES, **WORK}.items()}
BITS = {f"{prefix}bit/s": Fraction(1000**i, 8) for i, prefix in enumerate(("", "k", "M", "G", "T"))}
TIMES = {"us": Fraction(1, 10**6), "ms": Fraction(1, 1000), "minutes": 60, "hours": 3600, "days": 86400,
         "years": 31557600}
COUNTS = {"million": 10**6, "billion": 10**9, "trillion": 10**12}
SCALES: dict[str, int | Fraction] = {**BYTES, **WORK, **RATES, **BITS, **TIMES, **COUNTS}
SPELLED = {"us": "µs"}


def write(value: Any, form: str) -> str:
    """`value` as text in the format `form`. Raises ValueError on an unknown format or a value that it can't take."""
    if form == "text":
        return str(value)
    if isinstance(value, bool) or not isinstance(value, int | float | Fraction):
        raise ValueError(f"{value!r} is no number: only the format 'text' takes it")
    if form in SCALES:
        return digits(as_written(value) / SCALES[form]) + NO_BREAK + SPELLED.get(form, form)
    if form not in WORDS:
        raise ValueError(f"unknown format {form!r}: use one of {', '.join([*SCALES, *WORDS, 'text'])}")
    return WORDS[form](value).replace(" ", NO_BREAK)


def digits(value: Fraction | float, shown: int = 4) -> str:
    """A number rounded to `shown` digits, or to its whole ones if they are more: 17.602 → "17.60", 16 → "16"."""
    exact = value if isinstance(value, Fraction) else as_written(value)
    rounded = round(exact, max(0, shown - magnitude(exact)))
    places = max(0, shown - magnitude(rounded))  # 999.96 has gained a digit
    text = f"{float(rounded):,.{places}f}"
    return text.rstrip("0").rstrip(".") if places and rounded == exact else text


def as_written(value: float) -> Fraction:
    """The number that Python prints: 29.4 is 294/10, not the binary number nearest to it."""
    return Fraction(str(value))


def magnitude(value: Fraction) -> int:
    """Digits before the point; of a number below 1, minus the zeros behind it: 12.5 → 2, 0.5 → 0, 0.012 → -1."""
    size, power = abs(value), 0
    while size >= Fraction(10) ** power:
        power += 1
    while size and size < Fraction(10) ** (power - 1):
        power -= 1
    return power


def count(value: float) -> str:
    """A whole number with thousands set off. An estimate may be rounded; a number below 100 has to be whole."""
    if value != round(value) and abs(value) < 100:
        raise ValueError(f"{value} is not a whole number of things: use the format 'number'")
    return f"{round(value):,}"


def ratio(value: float) -> str:
    """1.04 → "1.04×", 7.94 → "7.9×", 219.4 → "219×": how finely a ratio is read depends on its size."""
    shown = 3 if abs(value) < 2 else 2 if abs(value) < 100 else 3
    return digits(value, shown) + "×"


def percent(value: float) -> str:
    """0.853 → "85%", 0.0126 → "1.3%", of a fraction."""
    return digits(as_written(value) * 100, 2) + "%"


WORDS: dict[str, Callable[[Any], str]] = {
    "decimal": units.decimal, "binary": units.binary, "size": units.size, "s": units.seconds,
    "count": count, "ratio": ratio, "%": percent, "number": lambda value: digits(value, 3),
}
