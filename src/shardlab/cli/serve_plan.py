"""`shardlab plan MODEL --requests 20 --prompt 2000 --answer 200`: how many cards a load takes, below what one holds."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from ..cost import Capacity, Load, Plan, Serve, capacity
from ..specs.check import number
from ..specs.units import seconds
from .terminal import plain_table

NARROW = 100  # columns of a terminal below which a row is two lines
PRICE = 2.0  # an hour of a card, where nothing is said
ASKED = {"requests": "so many a second", "prompt": "tokens of a prompt", "answer": "tokens of an answer"}


def load_of(options: dict[str, float | int | None]) -> Load | None:
    """What is asked for; None where none of it is given. Raises ValueError where a part of it is missing, be it that
    only limits or a price are given."""
    given = {name: value for name, value in options.items() if value is not None}
    if not given:
        return None
    if missing := [name for name in ASKED if name not in given]:
        wanted = ", ".join(f"--{name} ({ASKED[name]})" for name in missing)
        raise ValueError(f"--{next(iter(given))} belongs to a load, which is not whole: add {wanted}")
    given.pop("price", None)
    return Load(rate=number("requests", given.pop("requests")), **given)  # type: ignore[arg-type]


def capacity_of(made: Plan, load: Load, price: float | None) -> Capacity:
    """How many of the plan's cards that takes, weights and caches stored as the ladder's first rung has them."""
    task = made.task
    assert isinstance(task, Serve)
    dtype = task.dtype or made.spec.stored or "bf16"
    return capacity(made.spec, made.card, load, cards=made.cards, dtype=dtype, kv_dtype=task.kv_dtype,
                    reserve=task.reserve, price=PRICE if price is None else price)


def show_capacity(plan: Capacity) -> None:
    """The layouts in a terminal, what they do and how many cards the load takes of each; then the answers."""
    console = Console(highlight=False)
    narrow = console.width < NARROW
    console.print(Text("\n" + plan.title, style="bold"))
    headings = ("cards", "layout") if narrow else ("cards", "layout", "at once", "requests/s", "a card", "first token",
                                                   "a further one", "")
    table = plain_table(*headings)
    for one, row in zip(plan.options, plan.rows, strict=True):
        cards = Text(f"{one.cards}" if one.copies else "–")
        if narrow:
            table.add_row(cards, Text(f"{one.layout.degrees}\n{row.derivation}{'; ' * bool(row.note)}{row.note}"))
            continue
        cells = (one.layout.degrees, f"{one.room.total:,}", f"{one.rate.rate * one.layout.dp:.3g}",
                 f"{one.per_card:.3g}", seconds(one.ttft), seconds(one.tpot), row.note)
        table.add_row(cards, *map(Text, cells))
    if plan.options:
        console.print(table)
    console.print(Text("\n".join(plan.footnotes)))
