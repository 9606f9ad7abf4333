"""What a cut will cost, before any rank is started. Standard library only."""

from .bill import Bill, Row
from .kv import kv_cache, kv_per_token, requests_that_fit
from .memory import MemoryBill, checkpoint, memory
from .traffic import Collective, TrafficBill, traffic

__all__ = ["Bill", "Collective", "MemoryBill", "Row", "TrafficBill", "checkpoint", "kv_cache", "kv_per_token", "memory",
           "requests_that_fit", "traffic"]
