"""A layout as one word of a command line: "dp=2,tp=2,pp=2,schedule=1f1b,microbatches=4"."""

from __future__ import annotations

from dataclasses import fields
from difflib import get_close_matches

from ..specs import Layout

TEXT = ("schedule", "order", "sp")
NAMES = tuple(field.name for field in fields(Layout))


def layout_from(text: str) -> Layout:
    """The `Layout` of comma-separated name=value pairs; of none, one rank. Raises ValueError on a name that a layout
    has not, on one given twice or without a number, and as `Layout` does."""
    given: dict[str, int | str | bool] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, equals, value = (each.strip() for each in part.partition("="))
        if name not in NAMES:
            near = get_close_matches(name, NAMES, 1, 0.5)
            raise ValueError(f"a layout has no {name!r}" + (f": did you mean {near[0]}?" if near else ".") +
                             f" It is written as {'=…, '.join(NAMES)}=…, each of which may be left out")
        if not (equals and value):
            raise ValueError(f"{part!r} of the layout has no value: {name}={'1f1b' if name == 'schedule' else 2}")
        if name in given:
            raise ValueError(f"the layout has {name} twice: {name}={given[name]} and {part}")
        given[name] = value if name in TEXT else _whole(name, value)
    if given.get("sp") in ("false", "False"):
        given["sp"] = False
    return Layout(**given)  # type: ignore[arg-type]


def _whole(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{name} of the layout must be a whole number, not {value!r}: {name}=2") from None
