"""From the last hidden state to logits, or straight to the loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

IGNORED = -100  # the label that PyTorch and Hugging Face leave out of the loss


class Head(nn.Linear):
    """The output layer. It gives the loss too, because a cut head gets there without whole logits."""

    def __init__(self, hidden: int, vocab: int):
        super().__init__(hidden, vocab, bias=False)

    def forward(self, h: torch.Tensor, labels: torch.Tensor | None = None, valid: int | None = None,
                shape: torch.Size | None = None) -> torch.Tensor:
        """h (batch, seq, hidden) → logits (batch, seq, vocab), or with labels (batch, seq) their `cross_entropy`.

        With `shape` (batch, seq) h is the stream as `Transformer.stream` gives it, which a cut may have cut.
        """
        logits = super().forward(h)
        return logits if labels is None else cross_entropy(logits, labels, valid)

    def whole(self, stream: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """The stream of tokens of `shape` (batch, seq) as (batch, seq, hidden)."""
        return stream


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, valid: int | None = None) -> torch.Tensor:
    """The sum of −log softmax(logits)[label] over all labels but -100, in nats, ÷ `valid`: a scalar.

    logits (batch, seq, vocab), labels (batch, seq). `valid` None is the number of those labels, which makes it their
    mean (nan where there are none); where they are a part of a batch, `valid` is the number in all of it, and the
    parts' losses and gradients add up to those of the whole. In float32 at least: a sum over a large vocabulary needs
    it.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    if valid is None:
        return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum") / valid
