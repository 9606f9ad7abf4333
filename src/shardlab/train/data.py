"""Text as batches: which rank gets which sequences in which step, and nothing else has a say in it.

A batch depends on the seed, the step and the place on the data axis. Ranks of one tensor-parallel group, which work on
the same sequences, so get the same ones without a word between them; ranks along the data axis get different ones; and
a step is the same batch however many ranks share it. A run goes on at step s by asking for step s.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch

from ..model.head import IGNORED

MicroBatch = tuple[torch.Tensor, torch.Tensor]  # tokens and labels, each (sequences, seq)


def text(path: str | Path | None = None) -> torch.Tensor:
    """A file's bytes as tokens of a vocabulary of 256: (n,) uint8. Without a file, 465 KB of Python's own manual."""
    content = "\n".join(topics.values()).encode() if path is None else Path(path).read_bytes()
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


@dataclass(frozen=True)
class Batches:
    """`tokens` (n,) in windows of `seq`, drawn anew in each epoch, `batch` of them a step over all ranks.

    Each rank runs them in `accumulation` micro-batches, all of a step of one shape on all ranks. An epoch has every
    window once, so every token but the first is once a label. What is missing, in the last step of an epoch and at the
    end of the last window, is filled up with token 0 and label -100, which the loss leaves out.
    """

    tokens: torch.Tensor
    seq: int
    batch: int
    accumulation: int = 1
    seed: int = 0

    def __post_init__(self):
        if min(self.seq, self.batch, self.accumulation) < 1 or self.tokens.dim() != 1 or len(self.tokens) < 2:
            raise ValueError(f"{tuple(self.tokens.shape)} tokens in windows of {self.seq}, {self.batch} a step in "
                             f"{self.accumulation} parts: give 2 tokens or more in a row, and numbers from 1")

    @property
    def windows(self) -> int:
        """How many windows there are; the last may be shorter."""
        return -(-(len(self.tokens) - 1) // self.seq)

    @property
    def steps(self) -> int:
        """How many steps make an epoch; the last may have fewer windows."""
        return -(-self.windows // self.batch)

    def __call__(self, step: int, coordinate: int = 0, size: int = 1) -> list[MicroBatch]:
        """What rank `coordinate` of a data axis of `size` ranks runs in `step`, counted from 0 over all epochs."""
        if not 0 <= coordinate < size or step < 0:
            raise ValueError(f"step {step} of rank {coordinate} of {size}: count both from 0")
        epoch, place = divmod(step, self.steps)
        # a generator of their own, so that data takes nothing from the one that dropout draws from; and a seed that is
        # scrambled, since of a seed torch's generator takes the lower 32 bits alone
        generator = torch.Generator().manual_seed(random.Random(f"{self.seed} {epoch}").getrandbits(32))
        drawn = torch.randperm(self.windows, generator=generator)[place * self.batch :][: self.batch]
        rows = -(-len(drawn) // (size * self.accumulation))
        slots = drawn.new_full((size * self.accumulation * rows,), self.windows)  # a window past the end
        slots[: len(drawn)] = drawn
        return [self._cut(part) for part in slots.view(size, self.accumulation, rows)[coordinate]]

    def _cut(self, windows: torch.Tensor) -> MicroBatch:
        at = windows.unsqueeze(1) * self.seq + torch.arange(self.seq + 1)
        there = at < len(self.tokens)
        ids = self.tokens[at.where(there, 0)].long().where(there, 0)
        return ids[:, :-1], ids[:, 1:].where(there[:, 1:], IGNORED)
