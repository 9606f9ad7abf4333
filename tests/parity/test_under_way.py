"""What ZeRO has whole at its worst moment is what the bill says, looked at whenever a collective begins or ends."""

import pytest
import torch

from shardlab.cost.data_rows import DataRows
from shardlab.cost.parameters import parameters
from shardlab.cost.under_way import Moment, under_way
from shardlab.model.transformer import Transformer
from shardlab.parallel import grads, zero
from shardlab.specs import Layout, ModelSpec

BUCKET = 5000


def largest_moment(group, spec, stage):
    """Numbers of weights and gradients that are whole at a time: at most, in two steps."""
    model = Transformer(spec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero.shard(model, optimizer, group, stage, BUCKET)
    reducer, worst = model.reducer, Moment(0, 0)

    def look(*_):
        nonlocal worst
        gradients = sum(bucket.row.numel() for bucket in reducer.buckets if bucket.row is not None)
        units = reducer.gathering.units if stage == 3 else ()
        weights = sum(row.untyped_storage().nbytes() // 4 for unit in units for row in unit.rows.values())
        worst = max(worst, Moment(weights, gradients), key=sum)

    def watched(owner, name):
        begin = getattr(owner, name)

        def looking(*args):
            look()
            result = begin(*args)
            look()
            return result

        setattr(owner, name, looking)

    watched(reducer, "send")
    for unit in reducer.gathering.units if stage == 3 else ():
        watched(unit, "fetch")
        watched(unit, "free")
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    tokens = torch.arange(12).view(2, 6)
    for _ in range(2):
        model.loss(tokens, tokens + 1, 24).backward()
        grads.finish(model)
        optimizer.step()
        optimizer.zero_grad()
    return tuple(worst)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sizes", [dict(ffn=20, vocab=23), dict(ffn=10, vocab=99), dict(ffn=90, vocab=13),
                                   dict(layers=1, ffn=9, vocab=99)])
@pytest.mark.parametrize("stage", [2, 3])
def test_the_largest_moment(pool, stage, sizes, tied):
    spec = ModelSpec(**dict(hidden=12, layers=3, heads=6, kv_heads=2, head_dim=4, tied=tied) | sizes)
    for p in (2, 3):
        rows = DataRows(parameters(spec), Layout(dp=p, zero=stage), tied, 4, BUCKET)
        for weights, gradients in pool(p).run(largest_moment, spec, stage):
            assert weights + gradients == sum(under_way(rows)) > 0
