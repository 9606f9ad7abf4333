"""Tables of models, cards, links and formats, written by the library while the page is built.

    ```{spec-table} cards-memory
    ```
    ```{spec-sources} cards
    ```

The first shows figures, a row for each entry of the library's data files; `TABLES` has the names. The second lists
where the figures come from, with dates and what they leave open. Another name is an error with its line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any, ClassVar, NamedTuple

from computed import names
from docutils import nodes
from formats import as_written, digits
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from shardlab.cost import kv_per_token, memory
from shardlab.specs import (
    CardSpec,
    Format,
    ModelSpec,
    bundled_cards,
    bundled_links,
    bundled_models,
    find_model,
    format_of,
)

GB, GIB, KIB, TERA = 10**9, 2**30, 2**10, 10**12
NOT_KNOWN = "–"
ARXIV = re.compile(r"arXiv:(\d{4}\.\d{5})")
FORMATS = ("fp32", "bf16", "fp16", "int8", "int4", "fp8", "mxfp4", "fp4-fp8")


class Column(NamedTuple):
    """A heading, and what stands under it for an entry: numbers to the right, words to the left."""

    title: str
    cell: Callable[[Any], str]
    number: bool = True


class Table(NamedTuple):
    """Entries, and the columns that show them; the first column is what the library calls an entry."""

    entries: Callable[[], Iterable[Any]]
    columns: list[Column]


def scaled(value: float | None, unit: int) -> str:
    """`value` in `unit`, to four digits; a dash for what isn't known."""
    if value is None:
        return NOT_KNOWN
    return digits(Fraction(value) / unit if isinstance(value, int) else as_written(value) / unit)


def rates(card: CardSpec, dtype: str) -> str:
    """Dense TFLOP/s in `dtype`; a dash where the card has no such arithmetic, or no source gave it."""
    return scaled(card.flops.get(dtype), TERA)


def models() -> list[ModelSpec]:
    """Every bundled model, from the smallest to the largest."""
    return sorted((find_model(name) for name in bundled_models()), key=lambda spec: spec.total)


def bits(form: Format) -> str:
    """Bits a number of a large matrix, scales included; of experts where they differ from the rest."""
    shape = (2**12, 2**12)
    each = dict.fromkeys(digits(as_written(8 * stored.nbytes(shape) / 2**24), 5)
                         for stored in (form.expert, form.matrix))
    return " / ".join(each)


def scales(form: Format) -> str:
    """What one scale stands for, rows × columns, and its bytes."""
    kinds = dict.fromkeys(stored for stored in (form.expert, form.matrix) if stored.block)
    return "; ".join(f"{down or 'all'} × {across or 'all'}, {stored.scale_bytes} B"
                     for stored in kinds for down, across in [stored.block]) or NOT_KNOWN


NAME = Column("name", lambda entry: entry.name, number=False)
DATE = Column("announced", lambda entry: entry.date, number=False)
TABLES = {
    "models-weights": Table(models, [
        NAME,
        Column("parameters (10⁹)", lambda m: scaled(m.total, GB)),
        Column("active (10⁹)", lambda m: scaled(m.active, GB)),
        Column("in bf16 (GB)", lambda m: scaled(memory(m, dtype="bf16").weights, GB)),
        Column("as published (GB)", lambda m: scaled(memory(m, dtype=m.stored).weights, GB)),
        Column("format", lambda m: m.stored, number=False),
        Column("published", lambda m: bundled_models()[m.name]["date"], number=False)]),
    "models-shape": Table(models, [
        NAME,
        Column("layers", lambda m: f"{m.layers}"),
        Column("hidden", lambda m: f"{m.hidden:,}"),
        Column("heads", lambda m: f"{m.heads}"),
        Column("KV heads", lambda m: "latent" if m.latent else f"{m.kv_heads}"),
        Column("experts", lambda m: f"{m.experts.active} of {m.experts.routed}" if m.experts else NOT_KNOWN),
        Column("KV cache a token (KiB)", lambda m: scaled(kv_per_token(m), KIB)),
        Column("context (tokens)", lambda m: f"{m.max_positions:,}")]),
    "cards-memory": Table(lambda: bundled_cards().values(), [
        NAME,
        Column("printed (GB)", lambda c: scaled(c.printed, GB)),
        Column("stacks hold (GiB)", lambda c: scaled(c.physical, GIB)),
        Column("driver reports (MiB)", lambda c: f"{c.usable // 2**20:,}" if c.usable else NOT_KNOWN),
        Column("in GiB", lambda c: scaled(c.usable, GIB)),
        Column("in GB", lambda c: scaled(c.usable, GB)),
        Column("read at (GB/s)", lambda c: scaled(c.hbm, GB)),
        DATE]),
    "cards-speed": Table(lambda: bundled_cards().values(), [
        NAME,
        *(Column(dtype, lambda c, dtype=dtype: rates(c, dtype)) for dtype in ("bf16", "fp8", "fp4", "int8", "tf32")),
        Column("bf16 headline, sparse", lambda c: scaled(c.headline("bf16"), TERA)),
        Column("ridge, bf16 (FLOP/B)", lambda c: digits(as_written(c.ridge("bf16")), 3)),
        Column("link", lambda c: c.link or NOT_KNOWN, number=False),
        Column("cards it joins", lambda c: f"{c.domain}"),
        Column("link to the host", lambda c: c.host_link or NOT_KNOWN, number=False)]),
    "links": Table(lambda: bundled_links().values(), [
        NAME,
        Column("one direction (GB/s)", lambda k: scaled(k.per_direction, GB)),
        Column("printed as (GB/s)", lambda k: scaled(k.headline, GB)),
        Column("how it comes about", lambda k: k.lanes, number=False),
        Column("α (µs)", lambda k: NOT_KNOWN if k.alpha is None else digits(as_written(k.alpha) * 10**6, 3)),
        DATE]),
    "formats": Table(lambda: [format_of(name) for name in FORMATS], [
        NAME,
        Column("bits a number, scales included", bits),
        Column("a scale for each (rows × columns)", scales, number=False),
        Column("experts", lambda f: f.expert.name, number=False),
        Column("other matrices", lambda f: f.matrix.name, number=False),
        Column("the rest", lambda f: f.rest.name, number=False)]),
}
SOURCES: dict[str, Callable[[], Iterable[tuple[str, str, str, str]]]] = {  # name, date, source, note
    "models": lambda: ((m, d["date"], d["source"], d.get("note", "")) for m, d in bundled_models().items()),
    "cards": lambda: ((c.name, c.date, c.source, c.note) for c in bundled_cards().values()),
    "links": lambda: ((k.name, k.date, k.source, k.note) for k in bundled_links().values()),
}


class FromSpecs(SphinxDirective):
    """A directive whose one argument is a name in `known`."""

    required_arguments = 1
    known: ClassVar[dict[str, Any]] = {}

    def run(self) -> list[nodes.Node]:
        names(self.env)  # the page is read again when the library or its data change
        if self.arguments[0] not in self.known:
            raise self.error(f"{self.name}: no {self.arguments[0]!r}, only {', '.join(self.known)}")
        return [self.show(self.known[self.arguments[0]])]

    def show(self, chosen: Any) -> nodes.Node:
        raise NotImplementedError


class SpecTable(FromSpecs):
    """{spec-table}: a row for each entry."""

    known = TABLES

    def show(self, chosen: Table) -> nodes.Node:
        group = nodes.tgroup(cols=len(chosen.columns))
        group += [nodes.colspec(colwidth=1) for _ in chosen.columns]
        group += nodes.thead("", row([(column.title, column.number, False) for column in chosen.columns]))
        group += nodes.tbody("", *(
            row([(column.cell(entry), column.number, column is NAME) for column in chosen.columns])
            for entry in chosen.entries()))
        return nodes.table("", group, classes=["spec-table"])


class SpecSources(FromSpecs):
    """{spec-sources}: where each entry comes from."""

    known = SOURCES

    def show(self, chosen: Callable[[], Iterable[tuple[str, str, str, str]]]) -> nodes.Node:
        items = nodes.bullet_list(classes=["spec-sources"])
        for name, date, source, note in chosen():
            text = f" ({date}). {source.rstrip('.')}." + (f" {note}" if note else "")
            items += nodes.list_item("", nodes.paragraph("", "", nodes.literal(name, name), *linked(text)))
        return items


def row(cells: list[tuple[str, bool, bool]]) -> nodes.row:
    """A row of (text, to the right, as code)."""
    out = nodes.row()
    for text, right, code in cells:
        shown = nodes.literal(text, text) if code else nodes.Text(text)
        out += nodes.entry("", nodes.paragraph("", "", shown), classes=["text-right" if right else "text-left"])
    return out


def linked(text: str) -> list[nodes.Node]:
    """The text with its arXiv numbers as links."""
    out: list[nodes.Node] = []
    for i, part in enumerate(ARXIV.split(text)):
        out.append(nodes.reference("", f"arXiv:{part}", refuri=f"https://arxiv.org/abs/{part}") if i % 2
                   else nodes.Text(part))
    return out


def setup(app: Sphinx) -> dict[str, Any]:
    """Register both."""
    app.add_directive("spec-table", SpecTable)
    app.add_directive("spec-sources", SpecSources)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
