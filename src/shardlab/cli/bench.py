"""`shardlab bench links`: what a message costs between two ranks of this machine, α and β."""

from __future__ import annotations

import json
import statistics
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from ..cost.fit import Fit, fit
from ..specs.units import binary
from .terminal import plain_table, refuse

bench = typer.Typer(add_completion=False, rich_markup_mode=None, help="Measure this machine.")
SIZES = [64 * 4**k for k in range(11)]  # 64 B to 64 MiB; every second one is fitted to, the others check the fit


@bench.callback()
def measure() -> None:
    """Measure this machine."""


@bench.command()
def links(
    transport: Annotated[str, typer.Option(help="backend (gloo) or shm (shared memory).")] = "backend",
    repeats: Annotated[int, typer.Option(help="Round trips for each size; the shortest counts.")] = 21,
    as_json: Annotated[bool, typer.Option("--json", help="Plain data: alpha, beta, samples, median error.")] = False,
) -> None:
    """Fit α (seconds a message) and β (bytes a second) to messages between two ranks on this machine."""
    from ..launch import launch  # imports torch, which no other command needs

    try:
        if repeats < 1:
            raise ValueError(f"--repeats must be 1 or more, not {repeats}")
        if transport not in ("backend", "shm"):
            raise ValueError(f"--transport must be backend or shm, not {transport}")
        samples = launch(half_round_trips, 2, transport, repeats, backend="gloo")[0]
        fitted = fit(samples[::2])
    except (ValueError, RuntimeError) as error:
        refuse(ValueError(str(error).splitlines()[0]))  # of a rank's failure, without its traceback
    errors = [abs(fitted.seconds(nbytes) / seconds - 1) for nbytes, seconds in samples[1::2]]
    if as_json:
        print(json.dumps({"transport": transport, "alpha": fitted.alpha, "beta": fitted.beta, "samples": samples,
                          "median_error": statistics.median(errors)}, indent=2))
    else:
        _show(samples, fitted, statistics.median(errors))


def half_round_trips(group, transport: str, repeats: int, sizes: list[int] = SIZES) -> list[tuple[int, float]]:
    """What a rank does: `comm.half_round_trips` over a transport."""
    from .. import comm

    with comm.use(transport=transport):
        return comm.half_round_trips(group, sizes, repeats)


def _show(samples: list[tuple[int, float]], fitted: Fit, error: float) -> None:
    console = Console(highlight=False)
    table = plain_table("bytes", "measured", "fitted", "error", "")
    for i, (nbytes, seconds) in enumerate(samples):
        guess = fitted.seconds(nbytes)
        table.add_row(binary(nbytes), f"{1e6 * seconds:,.1f} µs", f"{1e6 * guess:,.1f} µs",
                      f"{100 * (guess / seconds - 1):+.0f}%", Text("check" if i % 2 else "fitted to", style="dim"))
    console.print(table)
    found = f"α = {1e6 * fitted.alpha:.1f} µs a message, β = {fitted.beta / 1e9:.2f} GB/s in one direction"
    console.print("\n" + found, style="bold")
    console.print(f"median error {100 * error:.0f}% at the {len(samples) // 2} sizes that were not fitted to")
