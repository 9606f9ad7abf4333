"""Serving on the same cuts: a paged cache, a scheduler, an engine that answers requests with a cut model, and several
replicas behind one door, in processes of their own or simulated."""

from .batch import Batch, Item
from .cluster import Cluster
from .disagg import Workers
from .engine import Engine, VirtualClock, WallClock
from .events import Instance
from .kv_cache import BlockPool
from .metrics import Metrics
from .pages import KVLayout, PagedCache
from .rehearsal import Rehearsal
from .replica import Replica, pools
from .request import Answer, Request
from .router import LeastOutstanding, PrefixAffinity, RoundRobin, apart
from .runner import likeliest, sampled
from .scheduler import Scheduler, mixed, prefill_first
from .simulate import Simulated, Wire

__all__ = ["Answer", "Batch", "BlockPool", "Cluster", "Engine", "Instance", "Item", "KVLayout", "LeastOutstanding",
           "Metrics", "PagedCache", "PrefixAffinity", "Rehearsal", "Replica", "Request", "RoundRobin", "Scheduler",
           "Simulated", "VirtualClock", "WallClock", "Wire", "Workers", "apart", "likeliest", "mixed", "pools",
           "prefill_first", "sampled"]
