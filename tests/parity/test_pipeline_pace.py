"""The bubble that is measured on ranks against the one that `cost.timeline` predicts of the same list.

There are more ranks than cores, so that stages of matrix products would wait for a core, which is no bubble. Stages are
paced instead: forward and backward of a block sleep for a given time, which takes no core, and long enough that what a
busy machine adds does not count.
"""

import time

import pytest
import torch
from torch import nn

from shardlab import comm
from shardlab.comm import Ledger
from shardlab.cost.timeline import Times, timeline
from shardlab.model import Transformer
from shardlab.parallel import execute, pipeline
from shardlab.schedule import SCHEDULES, size
from shardlab.specs import ModelSpec

PACE = Times(0.08, 0.08, 0.08)


class Sleeps(torch.autograd.Function):
    """Nothing, in its time."""

    @staticmethod
    def forward(ctx, x, times):
        ctx.times = times
        time.sleep(times.forward)
        return x.clone()

    @staticmethod
    def backward(ctx, given):
        time.sleep(ctx.times.backward)
        return given, None


class Paced(nn.Module):
    times = Times(0, 0, 0)

    def forward(self, x, *_):
        return Sleeps.apply(x, self.times)


def paced(group, orders):
    stages, microbatches = size(orders)
    model = Transformer(ModelSpec(hidden=4, layers=stages, heads=1, kv_heads=1, head_dim=4, ffn=4, vocab=5))
    model.layers = nn.ModuleList(Paced() for _ in range(stages))
    pipeline.cut(model, group, orders)
    part = torch.ones(1, 2, dtype=torch.long)
    execute.run(model, orders, [(part, part)] * microbatches)  # what is done once is done
    for layer in model.layers.values():
        layer.times = PACE
    comm.barrier(group)
    with comm.record() as ledger:
        execute.run(model, orders, [(part, part)] * microbatches)
    return ledger


def bubble(ledgers):
    """Idle ÷ total, of all ranks' time from the first start to the last end."""
    works = Ledger.merge(ledgers).works
    total = max(each.end for each in works) - min(each.start for each in works)
    return 1 - sum(each.end - each.start for each in works) / (total * len(ledgers))


@pytest.mark.parametrize("name,microbatches", [("gpipe", 4), ("1f1b", 8), ("interleaved", 4)])
def test_the_measured_bubble_is_the_predicted_one(pool, name, microbatches):
    orders = SCHEDULES[name](4, microbatches)
    predicted = timeline(orders, PACE).bubble_over_total
    for _ in range(3):  # a machine may stand still for longer than any pace
        measured = bubble(pool(4).run(paced, orders))
        if measured == pytest.approx(predicted, rel=0.1):
            return
    raise AssertionError(f"measured {measured:.3f}, predicted {predicted:.3f}")
