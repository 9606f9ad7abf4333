"""`shardlab serve-bench --trace FILE`: a trace, or drawn requests, against the simulator or the real engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from .terminal import refuse

if TYPE_CHECKING:
    from ..serve import Answer, Request

LONGEST = 10**6  # tokens of a drawn length, on average


def serve_bench(
    trace: Annotated[Path | None, typer.Option(
        help="An Azure CSV or a Mooncake JSONL file; when left out, requests are drawn.")] = None,
    requests: Annotated[int, typer.Option(help="How many are drawn, or taken of the trace at most.")] = 1000,
    rate: Annotated[float | None, typer.Option(
        help="Requests a second: a trace is stretched to it; drawn ones are Poisson's, 4 when left out.")] = None,
    cv: Annotated[float, typer.Option(help="Drawn: how bursty arrivals are; 1 is Poisson.")] = 1.0,
    prompt: Annotated[float, typer.Option(help="Drawn: tokens of a prompt, on average.")] = 512,
    answer: Annotated[float, typer.Option(help="Drawn: tokens of an answer, on average.")] = 64,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 0,
    model: Annotated[str, typer.Option(help="Simulated: a bundled name, or a config.json.")] = "llama-3.1-8b",
    card: Annotated[str, typer.Option(help="Simulated: a bundled name, or your own card's .toml or .json.")] = "h100",
    tp: Annotated[int, typer.Option(help="Cards, or with --real ranks, that share each replica's layers.")] = 1,
    replicas: Annotated[int, typer.Option(help="Simulated: how many do both, prompts and answers.")] = 0,
    prefill: Annotated[int, typer.Option(help="Simulated: how many compute prompts only.")] = 0,
    decode: Annotated[int, typer.Option(help="Simulated: how many make answers only.")] = 0,
    link: Annotated[str, typer.Option(help="Simulated: what caches travel over, a port a card.")] = "ib-ndr",
    budget: Annotated[int, typer.Option(help="Tokens of a step with both prompts and answers in it.")] = 512,
    real: Annotated[str | None, typer.Option(
        help="A model for the real engine instead: small, smollm2 or a Hugging Face folder.")] = None,
    blocks: Annotated[int | None, typer.Option(
        help="Blocks of 16 tokens in each cache; what a card has room for, or 1024 with --real.")] = None,
    ttft: Annotated[float | None, typer.Option(help="Limit for the goodput: seconds to the first token.")] = None,
    tpot: Annotated[float | None, typer.Option(help="Limit for the goodput: seconds for each further one.")] = None,
    plot: Annotated[Path | None, typer.Option(help="File for a picture of the waits, .svg.")] = None,
) -> None:
    """Serve a trace, or requests that are drawn, and say how long they waited."""
    try:
        if plot is not None and (plot.suffix != ".svg" or not plot.parent.is_dir()):
            raise ValueError(f"--plot {plot}: give a file that ends in .svg, in a folder that is there")
        if real is not None and (replicas or prefill or decode):
            raise ValueError("--real is one replica, of --tp ranks: leave --replicas, --prefill and --decode out")
        from ..serve.metrics import Metrics  # brings torch, which no other command needs

        said: str
        cards: int | dict[str, int]
        if real is None:
            from .fleet import Fleet

            fleet = Fleet.of(model, card, tp, replicas, prefill, decode, link, budget, blocks)
            given = asked(trace, requests, rate, cv, prompt, answer, seed, fleet.vocab)
            answers, said, cards = fleet.answer(given, seed), fleet.title, fleet.cards
        else:
            from .real import Served

            served = Served.of(real, tp, budget, 1024 if blocks is None else blocks)
            given = asked(trace, requests, rate, cv, prompt, answer, seed, served.vocab)
            answers, said, cards = served.answer(given), served.title, tp
        if all(each.refused for each in answers):
            raise ValueError(f"all {len(answers):,} requests are refused; the first: {answers[0].refused}")
        metrics = Metrics(answers, ttft, tpot, cards)
    except (ValueError, OSError, RuntimeError) as error:
        refuse(error if isinstance(error, OSError) else ValueError(str(error).splitlines()[0]))
    console = Console(highlight=False)
    console.print(Text(said, style="bold"))
    console.print(Text(str(metrics)), soft_wrap=True)
    if plot is not None:
        draw(plot, said, answers, metrics)


def asked(trace: Path | None, count: int, rate: float | None, cv: float, prompt: float, answer: float, seed: int,
          vocab: int) -> list[Request]:
    """The requests of a trace, the first `count` of them, or so many drawn ones."""
    from ..serve import arrivals, traces, workload

    if count < 1:
        raise ValueError(f"--requests must be 1 or more, not {count}")
    for name, value in (("prompt", prompt), ("answer", answer)):
        if not 0 < value <= LONGEST:
            raise ValueError(f"--{name} {value:g}: give a number above 0, up to {LONGEST:,}")
    if trace is None:
        # spread about as much as in the traces
        lengths = [workload.Lengths(mean, 0.8, most=int(8 * mean) + 1) for mean in (prompt, answer)]
        due = arrivals.gamma(4.0 if rate is None else rate, cv, count, seed)
        return workload.synthetic(due, lengths[0], lengths[1], vocab, seed)
    if trace.suffix not in (".csv", ".jsonl"):
        raise ValueError(f"--trace {trace}: a trace is .csv, in Azure's format, or .jsonl, in Mooncake's")
    read = traces.azure if trace.suffix == ".csv" else traces.mooncake
    given = workload.first(read(trace, vocab, seed), count)
    return given if rate is None else workload.rescale(given, rate)


def draw(plot: Path, said: str, answers: Sequence[Answer], metrics) -> None:
    """The waits as a picture."""
    from ..show import waits

    waits({said: metrics.waits}, metrics.limits, said, [name for name in ("TTFT", "TPOT") if metrics.waits[name]]
          ).write_svg(plot)
