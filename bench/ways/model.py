"""What all ways train: a Llama of 26 million parameters, on one batch, by AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from shardlab.model import Transformer, initialise
from shardlab.specs import ModelSpec

SPEC = ModelSpec(hidden=512, layers=8, heads=8, kv_heads=8, head_dim=64, ffn=768, vocab=8192)
BATCH, SEQ = 8, 256
MICROBATCHES = 4  # of a pipeline

Step = Callable[[], torch.Tensor]  # one step of training; what this rank knows of the loss: all ranks' add up to it


def model() -> Transformer:
    """The plain model, the same each time."""
    with torch.device("meta"):
        empty = Transformer(SPEC)
    return initialise(empty, seed=0)


def batch(part: int = 0, parts: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, (BATCH / parts, SEQ) each: the part-th of `parts`."""
    drawn = torch.randint(SPEC.vocab, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(1))
    tokens, labels = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
    return tokens.chunk(parts)[part].clone(), labels.chunk(parts)[part].clone()


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def reference(group) -> Step:
    """One process, which knows nothing of ranks."""
    plain = model()
    optimizer = adamw(plain.parameters())
    tokens, labels = batch()

    def step() -> torch.Tensor:
        loss = plain.loss(tokens, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
