"""What a cut will cost, before any rank is started. Standard library only."""

from .activations import Activations, activations, forward_peak
from .bill import Bill, Row
from .korthikanti import korthikanti, selective_flops
from .kv import kv_cache, kv_per_token, requests_that_fit
from .ladder import Plan, ladder
from .memory import MemoryBill, Part, checkpoint, memory
from .serve_way import Serve
from .serving import serving
from .step import Step
from .time import bound, bytes_read, decode_floor, forward_flops, prefill_floor, training_flops, utilisation
from .traffic import Collective, TrafficBill, traffic
from .train_rungs import Train
from .training import training

__all__ = ["Activations", "Bill", "Collective", "MemoryBill", "Part", "Plan", "Row", "Serve", "Step", "TrafficBill",
           "Train", "activations", "bound", "bytes_read", "checkpoint", "decode_floor", "forward_flops",
           "forward_peak", "korthikanti", "kv_cache", "kv_per_token", "ladder", "memory", "prefill_floor",
           "requests_that_fit", "selective_flops", "serving", "traffic", "training", "training_flops", "utilisation"]
