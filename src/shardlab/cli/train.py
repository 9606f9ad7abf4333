"""`shardlab train --layout dp=2,tp=2`: train a model on the bytes of a text, on ranks that it starts or joins."""

from __future__ import annotations

import math
import os
import sys
import tempfile
import threading
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..specs import ModelSpec
from .layout import layout_from
from .plan import model_of
from .terminal import refuse

if TYPE_CHECKING:
    from ..train.job import Job

PRESETS: dict[str, dict[str, Any]] = {  # heads that 2, 3 and 4 ranks share
    "tiny": dict(hidden=48, layers=2, heads=12, kv_heads=12, head_dim=4, ffn=128),
    "small": dict(hidden=192, layers=4, heads=12, kv_heads=12, head_dim=16, ffn=512),
}
LOOK = 0.3  # seconds between two looks at what the ranks have logged
WHOLE, EACH = 86400.0, 600.0  # seconds for a run, and for a collective under torchrun


def train(
    layout: Annotated[str, typer.Option(help="dp=2,tp=2,pp=2,schedule=1f1b,microbatches=4; else one rank.")] = "",
    model: Annotated[str, typer.Option(
        help="tiny, small, sizes (hidden=96,layers=4,heads=12,ffn=256), or a config.json.")] = "small",
    text: Annotated[Path | None, typer.Option(help="A file, whose bytes are tokens; else Python's manual.")] = None,
    held_out: Annotated[float, typer.Option(help="Fraction of the text, its end, that is not trained on.")] = 0.0,
    steps: Annotated[int, typer.Option(help="Steps in all, those before a resume among them.")] = 100,
    batch: Annotated[int, typer.Option(help="Sequences of a step, over all ranks.")] = 32,
    seq: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 128,
    lr: Annotated[float, typer.Option(help="AdamW's rate after the warm-up; it then falls to a tenth.")] = 3e-3,
    warmup: Annotated[int, typer.Option(help="Steps in which the rate climbs.")] = 10,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 (with fp32 copies for the optimizer) or fp64.")] = "fp32",
    seed: Annotated[int, typer.Option(help="Of weights, data and dropout.")] = 0,
    dropout: Annotated[float, typer.Option(help="Probability with which a number is dropped.")] = 0.0,
    recompute: Annotated[str | None, typer.Option(help="selective or full.")] = None,
    checkpoints: Annotated[Path | None, typer.Option(help="Folder to save to.")] = None,
    every: Annotated[int, typer.Option(help="Steps between two checkpoints.")] = 100,
    keep: Annotated[int, typer.Option(help="How many checkpoints stay, the latest.")] = 2,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the latest checkpoint there.")] = False,
    log: Annotated[Path | None, typer.Option(
        "--log", "--log-file", help="File for a JSON object a step (torchrun takes --log for its own).")] = None,
    export: Annotated[Path | None, typer.Option(help="Hugging Face folder for the trained weights.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto: a GPU where there is one for each rank.")] = "auto",
    backend: Annotated[str, typer.Option(help="gloo, nccl or auto.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="Of each rank; cores ÷ ranks if left out.")] = None,
    timeout: Annotated[float | None, typer.Option(
        help="Seconds after which the run is ended (a day); under torchrun, a collective (600).")] = None,
) -> None:
    """Train a model on the bytes of a text. Under torchrun the ranks that are there are joined, else local ones start.

    Several machines: torchrun --nnodes 2 … -m shardlab.cli train --layout …, the same on each.
    """
    from ..launch import RankError, launch  # these import torch
    from ..launch.joined import launched, stands
    from ..train.job import Job, run

    try:
        made, spec = layout_from(layout), spec_from(model)
        job = Job(spec=spec, layout=made, text=_path(text), held_out=held_out, steps=steps, batch=batch, seq=seq, lr=lr,
                  warmup=warmup, dtype=dtype, seed=seed, dropout=dropout, recompute=recompute,
                  checkpoints=_path(checkpoints), every=every, keep=keep, resume=resume, log=_path(log),
                  export=_path(export), device=device)
        if text is not None:
            text.open("rb").close()
        threads = threads or max(1, (os.cpu_count() or 1) // made.world_size)
        timeout = timeout or (EACH if launched() else WHOLE)
        shared: dict[str, Any] = dict(backend=backend, timeout=timeout, threads=threads)
        if launched():
            done = launch(run, made.world_size, job, progress=True, **shared)[0]
            told = stands() == 0
        else:
            with _logged(job) as followed:
                done, told = launch(run, made.world_size, followed, **shared)[0], True
    except RankError as error:
        print(f"shardlab: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except (ValueError, OSError) as error:
        refuse(error)
    if told:
        print(summary(job, done))


def spec_from(text: str) -> ModelSpec:
    """A preset, sizes as name=value pairs, or the model of a config.json or a bundled name. Raises ValueError on a
    size that a model has not."""
    if text in PRESETS:
        return ModelSpec(name=text, vocab=256, tied=True, **PRESETS[text])
    if "=" not in text or Path(text).exists():
        return model_of(text)
    sizes: dict[str, Any] = {}
    known = [each.name for each in fields(ModelSpec) if each.type in ("int", "bool")]
    for part in text.split(","):
        name, _, value = (each.strip() for each in part.partition("="))
        if name not in known or not value.isdecimal():
            raise ValueError(f"{part!r} is no size of a model: write name=number, of {', '.join(known)}")
        sizes[name] = bool(int(value)) if isinstance(getattr(ModelSpec, name, None), bool) else int(value)
    if missing := [name for name in ("hidden", "layers", "heads", "ffn") if name not in sizes]:
        raise ValueError(f"a model needs {missing[0]}: --model hidden=96,layers=4,heads=12,ffn=256")
    rest = dict(kv_heads=sizes["heads"], head_dim=sizes["hidden"] // sizes["heads"], vocab=256, tied=True)
    return ModelSpec(name="model", **(rest | sizes))


def summary(job: Job, done: list) -> str:
    """What a run came to, in a line or two."""
    if not done:
        return f"nothing to do: the checkpoint is of step {job.steps}, the last"
    tokens = sum(step.tokens for step in done)
    lines = [f"{len(done)} steps of {job.layout.degrees}, {tokens:,} tokens: loss {done[0].loss:.4f} → "
             f"{done[-1].loss:.4f} (nats a byte)"]
    if skipped := sum(not math.isfinite(step.norm) for step in done):
        lines.append(f"{skipped} of them changed nothing: their gradients were not finite")
    lines += [f"weights: {job.export}"] * (job.export is not None)
    return "\n".join(lines)


@contextmanager
def _logged(job: Job):
    """The job with a log, whose end a thread shows as a progress bar: what ranks print comes line by line."""
    from dataclasses import replace

    with tempfile.TemporaryDirectory(prefix="shardlab-") as room:
        path = Path(job.log or Path(room) / "log")
        over = threading.Event()
        bar = threading.Thread(target=_follow, args=(path, job.steps, over), daemon=True)
        bar.start()
        try:
            yield replace(job, log=str(path))
        finally:
            over.set()
            bar.join()


def _follow(path: Path, steps: int, over: threading.Event) -> None:
    """Show the last line of a log until `over`."""
    from tqdm import tqdm

    from ..train import log

    before, ends = _changed(path), False
    with tqdm(total=steps, unit="step", disable=None) as bar:
        while not ends:
            ends = over.wait(LOOK)
            with suppress(OSError, ValueError):
                if _changed(path) != before and (last := log.last(path)) is not None:
                    done = last["step"] + 1
                    if not bar.n:  # from now on it counts: the ranks have started
                        bar.reset()
                        bar.initial = done
                    bar.set_postfix_str(log.said(last), refresh=False)
                    bar.update(done - bar.n)


def _changed(path: Path) -> int | None:
    """When the file was changed last; None where there is none."""
    return path.stat().st_mtime_ns if path.exists() else None


def _path(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())
