"""Training: text as batches, and one loop for every cut.

    tokens = text()                                           # bytes: a vocabulary of 256
    train(model, optimizer, Batches(tokens, seq=128, batch=32, accumulation=2), range(100), data=group)
    checkpoint.save("run", model, optimizer, step=100)        # read again under any layout: checkpoint.load
"""

from . import checkpoint, log, rates
from .data import Batches, text
from .loop import Step, step, train

__all__ = ["Batches", "Step", "checkpoint", "log", "rates", "step", "text", "train"]
