"""From the last hidden state to logits, or straight to the loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

IGNORED = -100  # the label that PyTorch and Hugging Face leave out of the loss


class Head(nn.Linear):
    """The output layer. Its loss stands beside its logits, because a cut head gets there without whole logits."""

    def __init__(self, hidden: int, vocab: int):
        super().__init__(hidden, vocab, bias=False)

    def loss(self, h: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """`cross_entropy` of the logits of h (batch, seq, hidden) under labels (batch, seq)."""
        return cross_entropy(self(h), labels)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean of −log softmax(logits)[label] over all labels but -100, in nats: a scalar, nan where all are -100.

    logits (batch, seq, vocab), labels (batch, seq). In float32 at least: a sum over a large vocabulary needs it.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED)
