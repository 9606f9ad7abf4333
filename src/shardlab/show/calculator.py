"""A calculator for a notebook: does a model fit on these cards, at this context, for so many requests at once?

The controls ask `cost.serving` and nothing else. On a page of the book, without a kernel, it shows the answer that it
was left at.
"""

from __future__ import annotations

from html import escape

import ipywidgets

from ..cost import MemoryBill, decode_floor, requests_that_fit, serving
from ..specs import CardSpec, Layout, bundled_cards, bundled_models, find_card, find_model, units
from .palette import HELD

FORMATS = ("bf16", "fp8", "int8", "int4", "mxfp4")
CARDS = (1, 2, 4, 8, 16)
TOKENS = tuple(2**i for i in range(9, 18))  # 512 to 128K
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def calculator(model: str = "llama-3.1-70b", dtype: str = "bf16", card: str = "h100", cards: int = 8,
               context: int = 8192, concurrency: int = 32) -> ipywidgets.VBox:
    """Controls for a model, its format, cards and load, and what each card then holds: shown as a notebook's output.

    The weights are cut by tensor parallelism over all `cards`. `context` is tokens a request, `concurrency` requests
    at once. Raises traitlets.TraitError on a start value that is not among the control's own.
    """
    wide = ipywidgets.Layout(width="100%", max_width="30em")
    look = {"layout": wide, "style": {"description_width": "6em"}}
    menus = {"model": (_models(), model), "dtype": (FORMATS, dtype), "card": (tuple(bundled_cards()), card)}
    scales = {"cards": (CARDS, cards), "context": (TOKENS, context), "concurrency": (REQUESTS, concurrency)}
    controls = {name: ipywidgets.Dropdown(options=options, value=value, description=name, **look)
                for name, (options, value) in menus.items()}
    controls |= {name: ipywidgets.SelectionSlider(options=[(f"{n:,}", n) for n in options], value=value,
                                                  description=name, **look)
                 for name, (options, value) in scales.items()}
    answer = ipywidgets.HTML(layout=ipywidgets.Layout(width="100%"))

    def update(_: object = None) -> None:
        answer.value = reply(**{name: control.value for name, control in controls.items()})

    for control in controls.values():
        control.observe(update, names="value")
    update()
    return ipywidgets.VBox([*controls.values(), answer])


def reply(model: str, dtype: str, card: str, cards: int, context: int, concurrency: int) -> str:
    """The answer as HTML: a verdict, a bar to the scale of the card, a row for each part. Or what is not possible."""
    spec, one, layout = find_model(model), find_card(card), Layout(tp=cards)
    try:
        bill = serving(spec, layout, context=context, concurrency=concurrency, dtype=dtype)
    except ValueError as error:
        return f"<p><b>can't be done so:</b> {escape(str(error))}</p>"
    free = one.memory - bill.per_rank + bill.part("KV cache")
    fit = requests_that_fit(free, spec, context, layout)
    if bill.per_rank <= one.memory:
        step = decode_floor(spec, one, layout, batch=concurrency, context=context, dtype=dtype)
        verdict = f"<b>fits</b>; up to {fit:,} such requests would. A step takes {units.seconds(step)} at least"
    elif bill.weights > one.memory:
        verdict = "<b>does not fit</b>: the weights alone are too large"
    else:
        verdict = f"<b>does not fit</b>: {fit:,} such requests would"
    return f"<p>{verdict}.</p>{_bar(bill, one)}{_table(bill, one)}"


def _models() -> tuple[str, ...]:
    """Those whose work on a prompt is known: what compressed attention has alive is not."""
    return tuple(name for name, sizes in bundled_models().items() if "compressed" not in sizes)


def _parts(bill: MemoryBill) -> dict[str, int]:
    return {"weights": bill.weights} | {part.kind: part.nbytes for part in bill.parts}


def _bar(bill: MemoryBill, card: CardSpec) -> str:
    """The parts side by side, and the card as a frame around as much of them as it holds."""
    scale = 100 / max(bill.per_rank, card.memory)
    boxes = "".join(f'<div style="width:{nbytes * scale:.2f}%;background:{HELD[kind]}"></div>'
                    for kind, nbytes in _parts(bill).items())
    frame = (f'<div style="position:absolute;top:0;left:0;width:{card.memory * scale:.2f}%;height:100%;'
             'border:3px solid #858585;box-sizing:border-box"></div>')
    return f'<div style="position:relative;display:flex;height:2em">{boxes}{frame}</div>'


def _table(bill: MemoryBill, card: CardSpec) -> str:
    def row(colour: str, what: str, nbytes: int) -> str:
        square = f'<span style="display:inline-block;width:.8em;height:.8em;background:{colour}"></span>'
        return (f'<tr><td style="padding-right:1.5em">{square} {what}</td>'
                f'<td style="text-align:right">{units.decimal(nbytes, 4)}</td></tr>')

    rows = "".join(row(HELD[kind], kind, nbytes) for kind, nbytes in _parts(bill).items())
    return (f'<table style="line-height:1.6">{rows}{row("none", "in all, on each card", bill.per_rank)}'
            f'{row("#858585", f"a card, {card.memory_is}", card.memory)}</table>')
