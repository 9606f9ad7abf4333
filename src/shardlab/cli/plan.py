"""`shardlab plan MODEL --card h100 --cards 8`: whether a model fits, and what to try in which order if it does not."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..cost import Bill, Plan, Planned, Serve, Train, ladder, plan_training
from ..specs import ClusterSpec, ModelSpec, bundled_models, find_card, find_model, format_of
from ..specs.units import count
from .serve_plan import capacity_of, load_of, show_capacity
from .terminal import plain_table, refuse

COLOURS = {"yes": "bold green", "would": "yellow", "no": "red"}
FEW = 5  # layouts that are shown
NARROW = 80  # columns of a terminal below which a bill leaves its derivations out


def plan(
    model: Annotated[str, typer.Argument(help="A bundled name (llama-3.1-70b), a config.json or a folder with one.")],
    card: Annotated[str, typer.Option(help="A bundled name (h100), or your own card's .toml or .json.")] = "h100",
    cards: Annotated[int, typer.Option(help="How many cards there are.")] = 1,
    train: Annotated[bool, typer.Option("--train/--serve", help="What the cards are for.")] = False,
    dtype: Annotated[str | None, typer.Option(
        help="How weights are stored: bf16, fp8, int4, … When left out: as published to serve, bf16 to train.")] = None,
    reserve: Annotated[str | None, typer.Option(
        help="Set aside on each card for the CUDA context and buffers, an assumption: 1 GiB when left out.")] = None,
    context: Annotated[int | None, typer.Option(
        help="Serve: tokens of a request, prompt and answer; 8192 when left out, if the model can.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Serve: requests at once.")] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="Serve: how the KV cache is stored.")] = None,
    latency: Annotated[float | None, typer.Option(help="Serve: seconds that a token may take.")] = None,
    rate: Annotated[float | None, typer.Option(help="Serve: tokens a second that are asked for in all.")] = None,
    requests: Annotated[float | None, typer.Option(
        help="Serve: requests a second; with --prompt and --answer, how many cards they take.")] = None,
    prompt: Annotated[int | None, typer.Option(help="Serve: tokens of a request's prompt.")] = None,
    answer: Annotated[int | None, typer.Option(help="Serve: tokens of its answer.")] = None,
    hits: Annotated[float | None, typer.Option(help="Serve: the share of a prompt that is cached already.")] = None,
    ttft: Annotated[float | None, typer.Option(help="Serve: seconds to the first token, on average.")] = None,
    tpot: Annotated[float | None, typer.Option(help="Serve: seconds for each further one, on average.")] = None,
    gap: Annotated[float | None, typer.Option(help="Serve: seconds that an answer may stand still.")] = None,
    price: Annotated[float | None, typer.Option(help="Serve: what a card costs an hour; 2 when left out.")] = None,
    batch: Annotated[int | None, typer.Option(help="Train: sequences of a step on each replica.")] = None,
    seq: Annotated[int | None, typer.Option(
        help="Train: tokens of a sequence; 4096 when left out, if the model can.")] = None,
    recompute: Annotated[str | None, typer.Option(help="Train: selective or full.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="Train: adamw, sgd or sgd+momentum.")] = None,
    tokens: Annotated[int | None, typer.Option(
        help="Train: tokens of a step, of all cards; with them, the best layouts and the time of their steps.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Plain data: inputs, parameters, steps, bill.")] = False,
) -> None:
    """Say whether MODEL fits on the cards, and what to try in which order if it does not."""
    serving: dict[str, Any] = {"context": context, "concurrency": concurrency, "kv_dtype": kv_dtype,
                               "latency": latency, "rate": rate}
    asked = {"requests": requests, "prompt": prompt, "answer": answer, "hits": hits, "ttft": ttft, "tpot": tpot,
             "gap": gap, "price": price}
    training = {"batch": batch, "seq": seq, "recompute": recompute, "optimizer": optimizer}
    both = {"reserve": reserve}
    try:
        spec, load = model_of(model), None if train else load_of(asked)
        if load and context is None:
            serving["context"] = context = load.longest
        task = (train_task(dtype, training | both, serving | asked) if train else
                serve_task(dtype, serving | both, training | {"tokens": tokens}))
        task = within(task, spec, context or seq)
        made = ladder(spec, find_card(card), task, cards)
        layouts = layouts_of(made, task, tokens) if isinstance(task, Train) and tokens is not None else None
        room = capacity_of(made, load, price) if load else None
    except (ValueError, OSError) as error:
        refuse(error)
    if as_json:
        more = {name: found.to_dict() for name, found in (("layouts", layouts), ("capacity", room)) if found}
        print(json.dumps(made.to_dict() | more, indent=2))
    else:
        show(made)
        if layouts:
            show_layouts(layouts)
        if room:
            show_capacity(room)


def layouts_of(made: Plan, task: Train, tokens: int) -> Planned:
    """The best layouts for steps of so many tokens, on all cards."""
    modes = (None, "full") if task.recompute is None else (task.recompute,)
    return plan_training(made.spec, ClusterSpec.of(made.card, made.cards), tokens=tokens, seq=task.seq,
                         dtype=task.dtype, modes=modes, optimizer=task.optimizer, reserve=task.reserve, few=FEW)


def model_of(name: str) -> ModelSpec:
    """A bundled model by its name, or the model of a config.json or of a folder with one."""
    is_path = name.endswith(".json") or os.sep in name or Path(name).is_dir()
    return ModelSpec.from_config(name) if is_path and name.lower() not in bundled_models() else find_model(name)


def serve_task(dtype: str | None, options: dict[str, Any], foreign: dict[str, Any]) -> Serve:
    """What is to be served. Raises ValueError on options of training."""
    return Serve(dtype=dtype, **given(options, foreign, "--train"))


def train_task(dtype: str | None, options: dict[str, Any], foreign: dict[str, Any]) -> Train:
    """What is to be trained, with master weights in fp32 unless `dtype` is as wide. Raises ValueError like above."""
    dtype = dtype or Train.dtype
    master = None if format_of(dtype).rest.bits >= 32 else "fp32"
    return Train(dtype=dtype, master=master, **given(options, foreign, "--serve"))


def within(task: Serve | Train, spec: ModelSpec, asked: int | None) -> Serve | Train:
    """The task, its own length no longer than the model was made for; a length that was asked for stays as it is."""
    if asked is not None:
        return task
    if isinstance(task, Serve):
        return replace(task, context=min(task.context, spec.max_positions))
    return replace(task, seq=min(task.seq, spec.max_positions))


def given(options: dict[str, Any], foreign: dict[str, Any], other: str) -> dict[str, Any]:
    """The options that were given. ValueError where one was that belongs to the `other` task."""
    for name, value in foreign.items():
        if value is not None:
            raise ValueError(f"--{name.replace('_', '-')} {value} goes with {other}: leave it out or add {other}")
    return {name: value for name, value in options.items() if value is not None}


def show(made: Plan) -> None:
    """The plan in a terminal: the steps, the answer, and the bill of what each card then holds."""
    console = Console(highlight=False)
    narrow, active = console.width < NARROW, f", {count(made.spec.active)} of them used by each token"
    console.print(Text(made.title, style="bold"))
    console.print(f"{count(made.spec.total)} parameters" + (active if made.spec.experts else ""), style="dim")
    console.print(steps_table(made, narrow))
    console.print(Text("\n" + "\n".join(made.footnotes), style="bold"))
    if made.bill:
        console.print()
        console.print(Text(made.bill.title, style="bold"))
        console.print(bill_table(made.bill, narrow))
        console.print(Text("\n".join(made.bill.footnotes), style="dim"))


def show_layouts(plan: Planned) -> None:
    """The best layouts in a terminal: the time of a step, how well the cards are used, what it waits for, and why."""
    console = Console(highlight=False)
    narrow = console.width < NARROW
    console.print(Text("\n" + plan.title, style="bold"))
    table = plain_table("a step", "layout") if narrow else plain_table("a step", "MFU", "bottleneck", "layout and why")
    for i, choice in enumerate(plan.choices):
        bill = choice.bill
        time, used = f"{bill.seconds:.4g} s", f"{100 * bill.utilisation:.1f}%"
        said = f"{choice.name}\n{plan.why(i)}"
        table.add_row(*((Text(time), Text(f"{said}; MFU {used}; {bill.bottleneck}")) if narrow else
                        (Text(time), Text(used), Text(bill.bottleneck), Text(said))))
    console.print(table)
    console.print(Text("\n".join(plan.footnotes), style="dim"))


def steps_table(made: Plan, narrow: bool) -> Table:
    """What was tried, in order, with the number that decided it; in a narrow terminal that stands below."""
    table = plain_table("does it?", "step") if narrow else plain_table("does it?", "step", "a card holds", "why")
    for step, row in zip(made.steps, made.rows, strict=True):
        does, name, nbytes = Text(step.does, style=COLOURS[step.does]), Text(step.name), row.cells()[2]
        table.add_row(*((does, Text(f"{step.name}\n{nbytes} a card; {step.why}")) if narrow else
                        (does, name, nbytes, Text(step.why))))
    return table


def bill_table(bill: Bill, narrow: bool) -> Table:
    """A bill's rows; in a narrow terminal without their derivations."""
    headings = ("what", "GB", "GiB") if narrow else ("what", "how it comes about", "GB", "GiB", "")
    table = plain_table(*headings)
    for row in bill.rows:
        label, derivation, decimal, binary, note = map(Text, row.cells())
        table.add_row(*((label, decimal, binary) if narrow else (label, derivation, decimal, binary, note)))
    return table
