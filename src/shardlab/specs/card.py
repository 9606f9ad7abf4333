"""What a card is: its memory, told apart by who counts it, how fast it is read, and its dense arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .check import number, whole
from .datafile import bundled, check_keys, entry, is_path, own_file
from .dtype import dtype_of
from .link import find_link, month
from .quantity import quantity

ARITHMETIC = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp6", "fp4", "int8", "int4")
_SIZES = ("printed", "physical", "usable")
_WORDS = ("link", "host_link", "source", "date", "note")


@dataclass(frozen=True, kw_only=True)
class CardSpec:
    """One GPU, or one GPU's share of a larger module.

    Memory in bytes, three counts of it: `printed` on the box, in the vendor's GB of 10^9; `physical`, what its memory
    stacks hold; `usable`, what its driver reports (the stacks less what error correction and the driver keep). None
    where it isn't known. `hbm` is bytes a second from that memory. `flops` has dense operations a second for each
    dtype; a datasheet's headline with 2:4 sparsity is `sparse` times that (None: it prints no such headline). `link` is
    the name of the link to the other cards of its `domain` (so many in the usual server or rack), `host_link` of that
    to the host's memory. `date` is the year and month of its announcement. Raises ValueError on sizes that are not
    above 0, on an unknown dtype, and where more is usable than there is.
    """

    name: str
    printed: int
    physical: int | None = None
    usable: int | None = None
    hbm: float
    flops: Mapping[str, float] = field(hash=False)
    sparse: float | None = None
    link: str | None = None
    host_link: str | None = None
    domain: int = 8
    source: str = ""
    date: str = ""
    note: str = ""

    def __post_init__(self):
        for size in _SIZES:
            if getattr(self, size) is not None or size == "printed":
                whole(size, getattr(self, size))
        whole("domain", self.domain)
        number("hbm", self.hbm)
        if self.physical and (self.usable or 0) > self.physical:
            raise ValueError(f"{self.name}: usable = {self.usable:,} B is more than physical = {self.physical:,} B")
        if not self.flops:
            raise ValueError(f"{self.name}: flops is empty; give at least one dtype, as in {{'bf16': 989e12}}")
        for dtype, rate in self.flops.items():
            if dtype not in ARITHMETIC:
                raise ValueError(f"{self.name}: unknown dtype {dtype!r} in flops: use {', '.join(ARITHMETIC)}")
            number(f"flops[{dtype!r}]", rate)
        if self.sparse is not None:
            number("sparse", self.sparse)
        month(self.date)

    @property
    def memory(self) -> int:
        """Bytes to plan with: what the driver reports, or what is printed where that isn't known (`memory_is` says)."""
        return self.usable or self.printed

    @property
    def memory_is(self) -> str:
        """Whose count `memory` is, in words."""
        return "as its driver reports" if self.usable else "as printed; what its driver reports is not known"

    def flop_rate(self, dtype: object) -> float:
        """Dense FLOP/s in `dtype`, by our name or PyTorch's. ValueError naming the dtypes that the card computes in."""
        name = str(dtype).removeprefix("torch.")
        for known in (name, _short(name)):
            if known in self.flops:
                return self.flops[known]
        raise ValueError(f"{self.name} has no arithmetic in {dtype!r} that is known here: {', '.join(self.flops)}")

    def headline(self, dtype: object) -> float | None:
        """FLOP/s as a datasheet prints them, with 2:4 sparsity; None where it prints none. Raises like `flop_rate`."""
        return self.flop_rate(dtype) * self.sparse if self.sparse else None

    def ridge(self, dtype: object) -> float:
        """FLOP that the card computes while it reads a byte: below so many a byte, work waits for the memory."""
        return self.flop_rate(dtype) / self.hbm


def bundled_cards() -> dict[str, CardSpec]:
    """Every bundled card by name, from `data/cards.toml`, in the order of the file."""
    return {name: _card(name, data) for name, data in bundled("cards").items()}


def find_card(name: str | Path) -> CardSpec:
    """A bundled card, `find_card("h100")`, or your own from a .toml or .json file, `find_card("my-card.toml")`.

    The file has the keys of a CardSpec, each quantity with its unit: printed = "24 GB", hbm = "1008 GB/s", flops =
    { bf16 = "165 TFLOP/s" }, link = "pcie4". Raises ValueError on another name (with the nearest ones), on a missing or
    unknown key by its name, on a quantity without a unit and on a broken file; FileNotFoundError.
    """
    if is_path(name):
        data = own_file(name)
        return _card(str(data.pop("name", Path(name).stem)), data)
    return _card(str(name).lower(), entry("card", str(name), bundled("cards")))


def _card(name: str, data: dict[str, Any]) -> CardSpec:
    check_keys(f"the card {name!r}", data, ("printed", "hbm", "flops"),
               ("physical", "usable", "sparse", "domain", *_WORDS))
    fields: dict[str, Any] = {size: _whole_bytes(size, data[size]) for size in _SIZES if size in data}
    fields |= {key: data[key] for key in ("sparse", "domain", *_WORDS) if key in data}
    if not isinstance(data["flops"], dict):
        raise ValueError(f"flops = {data['flops']!r}: give a table of dtypes, as in {{ bf16 = \"989 TFLOP/s\" }}")
    flops = {dtype: float(quantity(f"flops.{dtype}", rate, "FLOP/s")) for dtype, rate in data["flops"].items()}
    for link in ("link", "host_link"):
        if link in data:
            find_link(data[link])  # a name that means nothing is refused here, not where it is used first
    return CardSpec(name=name, hbm=float(quantity("hbm", data["hbm"], "B/s")), flops=flops, **fields)


def _whole_bytes(key: str, text: object) -> int:
    size = quantity(key, text, "B")
    return whole(key, int(size) if size.denominator == 1 else text)


def _short(name: str) -> str:
    try:
        return dtype_of(name).name
    except ValueError:
        return name
