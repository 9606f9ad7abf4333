"""Moving tensors between ranks: the verbs, their differentiable regions, and the ledger that counts them."""

from . import flight, regions
from .ledger import Entry, Ledger, axis_of, phase, record
from .ops import Handle, all_gather, all_reduce, barrier, broadcast, recv, reduce_scatter, send, use

__all__ = ["Entry", "Handle", "Ledger", "all_gather", "all_reduce", "axis_of", "barrier", "broadcast", "flight",
           "phase", "record", "recv", "reduce_scatter", "regions", "send", "use"]
