"""What a cut will cost, before any rank is started. Standard library only."""

from .activations import Activations, activations, forward_peak
from .bill import Bill, Row
from .capacity import Capacity, Option, capacity, layouts_of
from .collective import Collective
from .comm import algbw, busbw, crossover, fastest, hops, message_count, serial_bytes, wire
from .comm import seconds as collective_seconds
from .concurrency import Concurrency, Preempted, concurrency, preempted
from .dispatch import Dispatch, dispatch
from .files import checkpoint
from .fit import Fit, fit
from .handover import Handover, handover, kv_handed
from .korthikanti import korthikanti, selective_flops
from .kv import kv_cache, kv_per_token, requests_that_fit
from .ladder import Plan, ladder
from .load import Load
from .memory import memory
from .memory_bill import MemoryBill, Part
from .messages import ALGORITHMS, Message, messages
from .pipeline import PipelineBill, pipeline
from .pipeline_bill import weight_versions
from .planner import Choice, Planned, plan_training
from .planner_why import Difference, why
from .pools import Pools, Role, balance
from .queueing import Steady, little, md1_wait, steady
from .serve_rates import Rate, best_split, colocated, colocated_at, decode_pool, prefill_pool
from .serve_step import ServeStep, StepBill, serve_step
from .serve_way import Serve
from .serving import serving
from .step import Step
from .step_fit import StepFit, fit_steps
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
from .why_not import Condition, Split, Verdict, why_not, why_not_split

__all__ = ["ALGORITHMS", "Activations", "Bill", "Capacity", "Choice", "Collective", "Concurrency", "Condition",
           "Difference", "Dispatch", "Fit", "Handover", "Load", "MemoryBill", "Message", "Option", "Part",
           "PipelineBill", "Plan", "Planned", "Pools", "Preempted", "Rate", "Role", "Roofline", "Row", "Serve",
           "ServeStep", "Speeds", "Split", "Steady", "Step", "StepBill", "StepFit", "StepTime", "Timeline", "Times",
           "TrafficBill", "Train", "Verdict", "activations", "algbw", "attention_flops", "balance", "best_split",
           "bound", "busbw", "bytes_read", "capacity", "checkpoint", "collective_seconds", "colocated", "colocated_at",
           "concurrency", "crossover", "decode_floor", "decode_pool", "dispatch", "fastest", "fit", "fit_steps",
           "forward_flops", "forward_peak", "handover", "heads_traffic", "hops", "idle_by_formula", "implied_share",
           "korthikanti", "kv_cache", "kv_handed", "kv_per_token", "ladder", "layouts_of", "little", "matmul",
           "md1_wait", "memory", "message_count", "messages", "pipeline", "plan_training", "preempted",
           "prefill_floor", "prefill_pool", "requests_that_fit", "selective_flops", "serial_bytes", "serve_step",
           "serving", "steady", "step_time", "timeline", "traffic", "training", "training_flops", "transfer_seconds",
           "utilisation", "weight_versions", "why", "why_not", "why_not_split", "wire"]
