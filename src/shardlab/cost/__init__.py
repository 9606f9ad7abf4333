"""What a cut will cost, before any rank is started. Standard library only."""

from .bill import Bill, Row
from .memory import MemoryBill, kv_per_token, memory
from .traffic import Collective, TrafficBill, traffic

__all__ = ["Bill", "Collective", "MemoryBill", "Row", "TrafficBill", "kv_per_token", "memory", "traffic"]
