"""A whole run as plain data, and what each rank does of it: `launch(job.run, job.layout.world_size, job)`.

The model is trained from scratch on a text's bytes. `shardlab train` is this on the command line.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from ..model.parameters import initialise
from ..model.transformer import Transformer
from ..parallel import layout as layouts
from ..parallel import weights
from ..parallel.agreement import differing
from ..specs import Layout, ModelSpec
from ..specs.dtype import dtype_of
from . import checkpoint, rates
from .data import Batches, text
from .loop import Step, train

BYTES = 256  # a byte is a token


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to train, on what, laid out how.

    A step has `batch` sequences of `seq` tokens of the file `text` (None: `data.text`'s own), all but its last
    `held_out`, a fraction. `lr` is AdamW's rate after `warmup` steps, from where it falls as `rates.cosine` does.
    `dtype` is that of weights and computation ("bf16"; the optimizer then steps copies in fp32). Every `every` steps,
    and after the last, a checkpoint goes into the folder `checkpoints`, where the last `keep` stay; with `resume` the
    run goes on from the latest there. `log` is a file (`log.Log`), `export` a Hugging Face folder for the trained
    weights. `device` is "cpu", "cuda", or "auto": the GPU where there is one for each rank.

    Raises ValueError where the parts do not fit together: the model's vocabulary, the layout, the micro-batches.
    """

    spec: ModelSpec
    layout: Layout = field(default_factory=Layout)
    text: str | None = None
    held_out: float = 0.0
    steps: int = 100
    batch: int = 32
    seq: int = 128
    lr: float = 3e-3
    warmup: int = 10
    max_norm: float = 1.0
    dtype: str = "fp32"
    seed: int = 0
    dropout: float = 0.0
    recompute: str | None = None
    bias_rate: float | None = None
    checkpoints: str | None = None
    every: int = 100
    keep: int = 2
    resume: bool = False
    log: str | None = None
    export: str | None = None
    device: str = "auto"

    def __post_init__(self):
        self.layout.check(self.spec)
        if self.spec.vocab < BYTES:
            raise ValueError(f"{self.spec.name} has a vocabulary of {self.spec.vocab}, and the text is bytes: "
                             f"give it {BYTES}")
        if self.seq > self.spec.max_positions:
            raise ValueError(f"seq = {self.seq} is longer than the {self.spec.max_positions} positions that "
                             f"{self.spec.name} was made for")
        parts = self.layout.dp * self.layout.microbatches
        if self.batch < 1 or self.batch % parts:
            near = max(1, round(self.batch / parts)) * parts
            raise ValueError(f"batch = {self.batch} sequences do not divide into dp × microbatches = {self.layout.dp} "
                             f"× {self.layout.microbatches}: take {near}")
        if min(self.steps, self.every, self.keep) < 1 or not 0 <= self.held_out < 1 or not self.lr > 0:
            raise ValueError(f"steps = {self.steps}, every = {self.every}, keep = {self.keep}, held_out = "
                             f"{self.held_out}, lr = {self.lr}: give whole numbers from 1, a fraction below 1 and a "
                             "rate above 0")
        if self.resume and self.checkpoints is None:
            raise ValueError("resume = True needs the folder of the checkpoints: give checkpoints")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"device = {self.device!r}: give auto, cpu or cuda")
        self.rate(0)
        dtype_of(self.dtype)

    def rate(self, step: int) -> float:
        """The factor of `lr` in that step."""
        return rates.cosine(step, self.steps, self.warmup)

    def split(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The text's tokens: those to train on, and those held out."""
        tokens = text(self.text)
        kept = round(len(tokens) * (1 - self.held_out))
        return tokens[:kept], tokens[kept:]

    def make(self) -> Transformer:
        """The plain model before the first step: the same on every rank, and for every layout."""
        plain = Transformer(self.spec, self.recompute, self.dropout)
        initialise(plain, self.seed)
        return plain.to(getattr(torch, dtype_of(self.dtype).torch))


def run(group: dist.ProcessGroup | None, job: Job, progress: bool = False) -> list[Step]:
    """What every rank does, or a process alone: the steps that were still to be done, and what each came to. Raises
    ValueError as `layout.cut`, `train` and `checkpoint.load` do."""
    tokens, _ = job.split()
    if group is not None:
        _agree(group, job, tokens)
    batches = Batches(tokens, job.seq, job.batch, job.layout.microbatches, seed=job.seed)
    adamw = partial(torch.optim.AdamW, lr=job.lr, betas=(0.9, 0.95), weight_decay=0.1)
    cut = layouts.cut(job.make().to(_device(group, job.device)), job.layout, adamw)
    optimizer = cast(torch.optim.Optimizer, cut.optimizer)
    folder = None if job.checkpoints is None else Path(job.checkpoints)
    first = 0 if folder is None else _resumed(folder, cut.model, optimizer, job.resume)

    def after(number: int, _) -> None:
        done = number + 1
        if folder is not None and (done % job.every == 0 or done == job.steps):
            checkpoint.save(folder, cut.model, optimizer, done, keep=job.keep, seed=job.seed)

    steps = train(cut.model, optimizer, batches, range(first, job.steps), cut.axes.data, job.max_norm, progress,
                  job.layout.orders, job.bias_rate, seed=job.seed, rate=job.rate, log=job.log, after=after)
    if job.export is not None:
        weights.save(cut.model, job.export)
    return steps


def _agree(group: dist.ProcessGroup, job: Job, tokens: torch.Tensor) -> None:
    """Raise ValueError where machines were told different runs, or have different texts: nothing else would tell."""
    told = repr(replace(job, text=None, log=None, export=None)).encode() + tokens.numpy().tobytes()
    if (rank := differing(told, group)) is not None:
        raise ValueError(f"rank {rank} was told another run than rank 0, or reads another text: give all machines the "
                         "same command and the same file; without one, the same Python, whose manual it is")


def _resumed(folder: Path, model: Transformer, optimizer: torch.optim.Optimizer, resume: bool) -> int:
    """The step to begin with: with `resume` that of the latest checkpoint, which is then loaded."""
    found = checkpoint.latest(folder)
    if found is not None and not resume:
        raise ValueError(f"{folder} has checkpoints up to {found.name}: go on from there (resume), or name another "
                         "folder")
    return 0 if found is None else checkpoint.load(found, model, optimizer)


def _device(group: dist.ProcessGroup | None, name: str) -> torch.device:
    """Where this rank computes. Ranks that are more than the GPUs share them."""
    own = torch.cuda.is_available() if group is None else "nccl" in dist.get_backend(group)
    if name == "cpu" or (name == "auto" and not own):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("device = 'cuda': PyTorch finds no GPU here; shardlab doctor says more")
    if group is not None and not own:
        torch.cuda.set_device(group.rank() % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())
