"""Moving tensors between ranks: the verbs, their differentiable regions, and the ledger that counts them."""

from . import flight, regions
from .groups import axis_of
from .ledger import Entry, Ledger, Message, Work
from .mark import phase, record, work
from .measure import half_round_trips
from .ops import all_gather, all_reduce, all_to_all, barrier, broadcast, gather, reduce, reduce_scatter, scatter
from .p2p import P2POp, batch_isend_irecv, recv, send
from .settings import use
from .way import Handle

__all__ = ["Entry", "Handle", "Ledger", "Message", "P2POp", "Work", "all_gather", "all_reduce", "all_to_all", "axis_of",
           "barrier", "batch_isend_irecv", "broadcast", "flight", "gather", "half_round_trips", "phase", "record",
           "recv", "reduce", "reduce_scatter", "regions", "scatter", "send", "use", "work"]
