"""Bubbles of pipelines, from the lists that run, and what a pipeline does to one request."""

from facts import SEVENTY
from facts_sizes import year

from shardlab.cost import Times, idle_by_formula, timeline
from shardlab.schedule import SCHEDULES, forward_only
from shardlab.specs import Layout
from shardlab.specs.stages import split

EQUAL = Times(1, 1, 1)  # F = 1, B = 2, of which W = 1


def plan(name, ranks, microbatches, *chunks):
    return timeline(SCHEDULES[name](ranks, microbatches, *chunks), EQUAL)


def held(ranks, microbatches, chunks):
    """What interleaving holds at most, over what 1F1B does: their stages are shorter."""
    return max(plan("interleaved", ranks, microbatches, chunks).live) / chunks / max(plan("1f1b", ranks, 64).live)


COMPUTED = {
    "A000-rank-product": lambda: Layout(pp=16, dp=64, ep=64).world_size,  # experts lie over ranks of the data axis
    "A000-dp": lambda: 2048 / Layout(pp=16).world_size,
    "A000-notp": lambda: Layout(pp=16, dp=128, ep=64, zero=1).tp,
    "A003-64gpu": lambda: Layout(8, pp=4, dp=2).world_size,
    "A000-year-gpipe": lambda: year("huang2018gpipe"),
    "A000-pp-latency": lambda: timeline(forward_only(4, 1), Times(1 / 4, 0, 0)).total,
    "A002-stages": lambda: len(split(SEVENTY.layers, SEVENTY.layers // 20)),
    "B2-gpipe-4-8": lambda: plan("gpipe", 4, 8).bubble_over_total,
    "B2-gpipe-neg": lambda: plan("gpipe", 8, 32).bubble_over_total,
    "B2-1f1b-ideal": lambda: plan("1f1b", 8, 64).bubble_over_ideal,
    "B2-1f1b-47": lambda: plan("1f1b", 16, 32).bubble_over_total,
    "B2-interleaved": lambda: plan("interleaved", 8, 64, 4).bubble_over_ideal,
    "B2-interleaved-6": lambda: plan("interleaved", 8, 16, 4).bubble_over_total,
    "B2-interleaved-mem": lambda: held(8, 64, 4),
    "B2-zb1p": lambda: plan("zero_bubble", 8, 20).idle,
    "B2-dualpipev": lambda: plan("dualpipe_v", 4, 20).idle,  # eight stages, on half as many ranks
    "B2-zb1p-third": lambda: idle_by_formula("zero_bubble", 8) / idle_by_formula("1f1b", 8),
}
