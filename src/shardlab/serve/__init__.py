"""Serving on the same cuts: a paged cache, a scheduler, and an engine that answers requests with a cut model."""

from .engine import Engine, VirtualClock, WallClock
from .kv_cache import BlockPool
from .pages import KVLayout, PagedCache
from .request import Answer, Request
from .runner import likeliest, sampled
from .scheduler import Batch, Item, Scheduler, mixed, prefill_first

__all__ = ["Answer", "Batch", "BlockPool", "Engine", "Item", "KVLayout", "PagedCache", "Request", "Scheduler",
           "VirtualClock", "WallClock", "likeliest", "mixed", "prefill_first", "sampled"]
