"""Several cuts at once: every call of a step and every byte held, predicted and counted, on each rank of a pipeline
whose stages are copied, cut and shared out once more."""

from collections import Counter
from functools import partial

import pytest
import torch
from test_bytes_data import held, predicted

from shardlab import comm, cost
from shardlab.model.transformer import Transformer
from shardlab.parallel import execute, grads, layout
from shardlab.specs import Experts, Layout, ModelSpec, dtype_of
from shardlab.train import loop

SIZES = dict(hidden=16, layers=5, heads=4, kv_heads=2, head_dim=4, ffn=29, vocab=53)
MIXTURE = Experts(routed=4, active=2, ffn=7, shared=1, first_dense=1, score="sigmoid", routing_bias=True)
BATCH, SEQ, BUCKET = 2, 7, 3000
OPTIMIZERS = {"adamw": partial(torch.optim.AdamW, lr=1e-3), "sgd": partial(torch.optim.SGD, lr=0.1),
              "sgd+momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9)}
UNEVEN = (6, 1, 3, 1, 1, 2, 1)


def step(_group, spec, plan, optimizer, dtype, recompute, frozen, weights, looped):
    """The calls of a step, of the cuts too; what the routers chose; the bytes held before gradients go."""
    torch.manual_seed(0)
    model = Transformer(spec, recompute).to(getattr(torch, dtype_of(dtype).torch))
    for name, parameter in model.named_parameters():
        if any(f"{name}.".startswith(f"{each}.") for each in frozen):
            parameter.requires_grad_(False)
    replica = plan.place(torch.distributed.get_rank())["dp"]
    generator = torch.Generator().manual_seed(replica)
    parts = [(each, each.roll(-1, 1)) for each in
             torch.randint(0, spec.vocab, (plan.microbatches, BATCH, SEQ), generator=generator)]
    routed = []
    with comm.record() as ledger:
        model, optim, axes = layout.cut(model, plan, OPTIMIZERS[optimizer], weights=weights, bucket_bytes=BUCKET)
        if looped:
            loop.step(model, optim, parts, axes.data, orders=plan.orders)
        else:
            execute.run(model, plan.orders, parts, 100, routed)
            grads.finish(model)
            grads.clip_grad_norm_(model, 1.0)
            optim.step()
    two = ("send", "recv")  # a message is in the ledger with its group
    calls = Counter((e.axis, e.op, e.phase, 2 if e.op in two and e.axis == "pp" else len(e.ranks), e.payload)
                    for e in ledger.entries)
    return calls, [each.counts for each in routed], held(model, optim)


def check(pool, plan, optimizer="adamw", dtype="fp32", recompute=None, frozen=(), weights=None, looped=False,
          experts=None, **sizes):
    spec = ModelSpec(**(SIZES | sizes), experts=experts)
    how = spec, plan, optimizer, dtype, recompute, frozen, weights
    ranks = pool(plan.world_size).run(step, *how, looped)
    bill = cost.pipeline(spec, layout=plan, batch=BATCH, seq=SEQ, dtype=dtype, recompute=recompute, weights=weights,
                         optimizer=optimizer, frozen=frozen, bucket=BUCKET)
    by_hand = pool(plan.world_size).run(step, *how, False) if looped and experts else ranks
    routed = [counts for _, counts, _ in by_hand]  # by the same router, of the same tokens
    for rank, (calls, _, bytes_held) in enumerate(ranks):
        mine = bill.at(rank)
        traffic = bill.traffic(mine, start=True, clip=True, loop=looped, routed=routed)
        assert mine.number == rank and calls == predicted(traffic), (rank, calls - predicted(traffic),
                                                                     predicted(traffic) - calls)
        if not looped:
            assert bytes_held == {kind: getattr(mine, kind) for kind in bytes_held}, rank
            states = cost.memory(spec, plan, dtype, True, optimizer, rank=rank, bucket=BUCKET, frozen=frozen,
                                 weights=weights)
            assert bytes_held == {kind: getattr(states, kind) for kind in bytes_held}
    return bill


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_pipeline_whose_stages_are_copied(pool, tied):
    """ZeRO lays a tied table in a row of its own, since both ends have to cut it alike."""
    for zero, optimizer in ((0, "adamw"), (1, "adamw"), (1, "sgd+momentum"), (0, "sgd")):
        check(pool, Layout(pp=2, dp=2, zero=zero, microbatches=3), optimizer, tied=tied)
    check(pool, Layout(pp=2, dp=2, zero=1, microbatches=2), dtype="bf16", tied=tied)
    check(pool, Layout(pp=2, dp=2, zero=1, microbatches=4, schedule="interleaved", chunks=2), tied=tied)


def test_a_pipeline_of_cut_sequences(pool):
    """Seven tokens of a sequence over two ranks: a rank has four, one of them padding."""
    for zero, recompute in ((0, None), (1, "full")):
        check(pool, Layout(pp=2, cp=2, zero=zero, microbatches=3), recompute=recompute, tied=True)
    check(pool, Layout(pp=2, cp=2, microbatches=3), recompute="selective",
          frozen=("embed_tokens", *(f"layers.{i}" for i in range(4))))  # backward comes to what a stage was sent


def test_a_pipeline_whose_experts_are_shared_out(pool):
    """Those of a layer over two ranks, which ZeRO leaves as they are; a stage without any."""
    for zero, recompute in ((0, None), (1, "full")):
        check(pool, Layout(pp=2, dp=2, ep=2, zero=zero, microbatches=3), recompute=recompute, experts=MIXTURE)
    check(pool, Layout(pp=2, cp=2, ep=2, microbatches=2), experts=MIXTURE, weights=(1, 9, 9, 9, 9))


@pytest.mark.parametrize("sp", [False, "keep", "again"])
def test_a_pipeline_of_cut_layers(pool, sp):
    check(pool, Layout(2, pp=2, sp=sp, microbatches=3), tied=sp != "keep", kv_heads=1 if sp else 2)


def test_other_schedules_stages_and_frozen_weights(pool):
    two = dict(pp=2, dp=2, zero=1)
    check(pool, Layout(**two, microbatches=4, schedule="dualpipe_v", chunks=2), tied=True)
    check(pool, Layout(**two, microbatches=3, schedule="zero_bubble"), tied=True, weights=UNEVEN)
    check(pool, Layout(**two, microbatches=2), frozen=("embed_tokens", "layers.0", "layers.3.mlp"), tied=True)
    check(pool, Layout(**two, microbatches=2), frozen=("layers.4", "norm", "lm_head"), weights=(1, 1, 1, 1, 9))
    check(pool, Layout(**two, microbatches=2, order="dp-tp-pp"))
    check(pool, Layout(pp=3, microbatches=2, schedule="gpipe"), tied=True)


def test_all_that_a_step_of_training_sends(pool):
    check(pool, Layout(pp=2, dp=2, zero=1, microbatches=3), looped=True, tied=True)
    check(pool, Layout(pp=2, cp=2, microbatches=2), looped=True)
    check(pool, Layout(pp=2, dp=2, ep=2, microbatches=2), looped=True, experts=MIXTURE)


@pytest.mark.more
def test_eight_ranks(pool):
    for tied in (False, True):
        check(pool, Layout(2, pp=2, dp=2, zero=1, sp="keep", microbatches=3), tied=tied)
        check(pool, Layout(2, pp=2, cp=2, zero=1, microbatches=3), tied=tied, recompute="full")
        check(pool, Layout(pp=4, dp=2, zero=1, microbatches=4, schedule="zero_bubble"), tied=tied)
        check(pool, Layout(pp=2, dp=4, ep=2, zero=1, microbatches=2), tied=tied, experts=MIXTURE)
        check(pool, Layout(pp=2, dp=2, cp=2, ep=2, microbatches=2), tied=tied, experts=MIXTURE)
        check(pool, Layout(pp=2, dp=4, ep=2, microbatches=2, order="dp-tp-pp"), tied=tied, experts=MIXTURE, looped=True)
