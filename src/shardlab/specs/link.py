"""What a link is: bytes a second in one direction, and what a message costs however short it is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .check import number
from .datafile import bundled, check_keys, entry, is_path, own_file
from .quantity import quantity

_WORDS = ("lanes", "source", "date", "note")


@dataclass(frozen=True, kw_only=True)
class LinkSpec:
    """What one card has of a link.

    `per_direction` is bytes a second that it can send while it receives as many. `headline` is the vendor's figure
    where that is another one, both directions added up for instance. `alpha` is seconds a message costs, None where
    no source is known. `lanes` says how the rate comes about; `date` is the year and month of its announcement. Raises
    ValueError on rates that are not above 0.
    """

    name: str
    per_direction: float
    headline: float | None = None
    alpha: float | None = None
    lanes: str = ""
    source: str = ""
    date: str = ""
    note: str = ""

    def __post_init__(self):
        number("per_direction", self.per_direction)
        if self.headline is not None and number("headline", self.headline) < self.per_direction:
            raise ValueError(f"{self.name}: headline = {self.headline:g} B/s is below per_direction = "
                             f"{self.per_direction:g} B/s; a headline adds directions up")
        if self.alpha is not None:
            number("alpha", self.alpha)
        month(self.date)


def bundled_links() -> dict[str, LinkSpec]:
    """Every bundled link by name, from `data/links.toml`, in the order of the file."""
    return {name: _link(name, data) for name, data in bundled("links").items()}


def find_link(name: str | Path) -> LinkSpec:
    """A bundled link, `find_link("nvlink4")`, or your own from a .toml or .json file with the keys of a LinkSpec.

    Each quantity has its unit: per_direction = "100 Gbit/s", alpha = "5 µs". Raises ValueError and FileNotFoundError
    like `find_card`.
    """
    if is_path(name):
        data = own_file(name)
        return _link(str(data.pop("name", Path(name).stem)), data)
    return _link(str(name).lower(), entry("link", str(name), bundled("links")))


def month(date: object) -> None:
    """ValueError unless `date` is empty or a year and a month, "2022-03"."""
    if not isinstance(date, str) or not re.fullmatch(r"(\d{4}-(0[1-9]|1[0-2]))?", date):
        raise ValueError(f"date = {date!r}: give the year and the month, as in \"2022-03\"")


def _link(name: str, data: dict[str, Any]) -> LinkSpec:
    check_keys(f"the link {name!r}", data, ("per_direction",), ("headline", "alpha", *_WORDS))
    fields: dict[str, Any] = {key: data[key] for key in _WORDS if key in data}
    for key, unit in (("per_direction", "B/s"), ("headline", "B/s"), ("alpha", "s")):
        if key in data:
            fields[key] = float(quantity(key, data[key], unit))
    return LinkSpec(name=name, **fields)
