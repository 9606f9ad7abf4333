"""Training: text as batches, and one loop for every cut.

    tokens = text()                                           # bytes: a vocabulary of 256
    train(model, optimizer, Batches(tokens, seq=128, batch=32, accumulation=2), range(100), data=group)
"""

from . import log, rates
from .data import Batches, text
from .loop import Step, step, train

__all__ = ["Batches", "Step", "log", "rates", "step", "text", "train"]
