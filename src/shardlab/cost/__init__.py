"""What a cut will cost, before any rank is started. Standard library only."""

from .activations import Activations, activations, forward_peak
from .bill import Bill, Row
from .collective import Collective
from .comm import algbw, busbw, crossover, fastest, hops, message_count, serial_bytes, wire
from .comm import seconds as collective_seconds
from .dispatch import Dispatch, dispatch
from .files import checkpoint
from .fit import Fit, fit
from .korthikanti import korthikanti, selective_flops
from .kv import kv_cache, kv_per_token, requests_that_fit
from .ladder import Plan, ladder
from .memory import memory
from .memory_bill import MemoryBill, Part
from .messages import ALGORITHMS, Message, messages
from .pipeline import PipelineBill, pipeline
from .pipeline_bill import weight_versions
from .planner import Choice, Planned, plan_training
from .planner_why import Difference, why
from .serve_way import Serve
from .serving import serving
from .step import Step
from .step_time import implied_share, step_time
from .step_time_bill import StepTime
from .step_time_speeds import Speeds
from .time import (
    Roofline,
    attention_flops,
    bound,
    bytes_read,
    decode_floor,
    forward_flops,
    matmul,
    prefill_floor,
    training_flops,
    utilisation,
)
from .timeline import Timeline, Times, idle_by_formula, timeline
from .traffic import TrafficBill, heads_traffic, traffic
from .train_rungs import Train
from .training import training
from .transfers import seconds as transfer_seconds

__all__ = ["ALGORITHMS", "Activations", "Bill", "Choice", "Collective", "Difference", "Dispatch", "Fit", "MemoryBill",
           "Message", "Part", "PipelineBill", "Plan", "Planned", "Roofline", "Row", "Serve", "Speeds", "Step",
           "StepTime", "Timeline", "Times", "TrafficBill", "Train", "activations", "algbw", "attention_flops", "bound",
           "busbw", "bytes_read", "checkpoint", "collective_seconds", "crossover", "decode_floor", "dispatch",
           "fastest", "fit", "forward_flops", "forward_peak", "heads_traffic", "hops", "idle_by_formula",
           "implied_share", "korthikanti", "kv_cache", "kv_per_token", "ladder", "matmul", "memory", "message_count",
           "messages", "pipeline", "plan_training", "prefill_floor", "requests_that_fit", "selective_flops",
           "serial_bytes", "serving", "step_time", "timeline", "traffic", "training", "training_flops",
           "transfer_seconds", "utilisation", "weight_versions", "why", "wire"]
