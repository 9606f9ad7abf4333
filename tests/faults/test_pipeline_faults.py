"""FAULTS.md on the pipeline.

| row        | where it is held                                                                                     |
|------------|------------------------------------------------------------------------------------------------------|
| P1, P2     | here: of every split, and of the layers that ranks really have                                       |
| P3         | here                                                                                                 |
| P6, D11    | tests/parity/test_pipeline_axes: a data axis where backward is split; the norm for p = 1, 2, inf     |
| P7, P9     | here                                                                                                 |
| D9, D10    | here: one scale, whatever the number of micro-batches and of runs                                    |
| C3, C5, C6 | here, on the pipeline; for the verbs in test_collective_faults                                       |
"""

import math
import sys
import time

import pytest
import torch
from measure import Live
from processes import eventually, family

from shardlab import comm
from shardlab.launch import RankError, RankTimeout, launch
from shardlab.model import Transformer
from shardlab.parallel import execute, grads, pipeline
from shardlab.parallel.loss import valid_tokens
from shardlab.schedule import SCHEDULES, Action, F, check, forward_only, gpipe, interleaved, one_f_one_b, placement
from shardlab.specs import ModelSpec
from shardlab.specs.stages import split

SPEC = ModelSpec(hidden=16, layers=5, heads=4, kv_heads=2, head_dim=4, ffn=29, vocab=53, tied=True)
SHM = pytest.param("shm", marks=pytest.mark.skipif(sys.platform != "linux", reason="ranks share memory on Linux"))


def model_of(spec=SPEC):
    torch.manual_seed(0)
    model = Transformer(spec).double()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def batch(rows):
    """Tokens and labels (rows, 7), no two rows with the same number of labels."""
    tokens = torch.arange(rows * 7).view(rows, 7) * 5 % 53
    return tokens, ((tokens * 3 + 1) % 53).where(torch.arange(7) <= torch.arange(rows).unsqueeze(1) % 7, -100)


def parts_of(rows, microbatches):
    return list(zip(*(each.chunk(microbatches) for each in batch(rows)), strict=True))


def whole_gradients(rows=8):
    """The plain model's, of all rows at once."""
    plain = model_of()
    plain.loss(*batch(rows)).backward()
    return {name: p.grad for name, p in plain.named_parameters()}


def apart(model, whole):
    """The largest difference of a gradient that this rank has, over the largest of all."""
    worst = max((whole[name] - p.grad).abs().max() for name, p in model.named_parameters())
    return (worst / max(g.abs().max() for g in whole.values())).item()


def test_p1_a_split_has_every_layer_once_and_is_even():
    """Megatron-LM#1304, #1778: 30 layers on 4 stages built 28."""
    for layers in range(1, 21):
        for stages in range(1, 9):
            bounds = split(layers, stages)
            assert [layer for stage in bounds for layer in stage] == list(range(layers)) and len(bounds) == stages
            assert max(map(len, bounds)) - min(map(len, bounds)) <= 1


def layers_here(group, orders, weights):
    model = pipeline.cut(model_of(), group, orders, weights)
    return [(number, list(stage.layers)) for number, stage in model.pipeline.mine.items()], list(model.layers)


@pytest.mark.parametrize("name,weights", [("interleaved", None), ("interleaved", (3, 1, 1, 1, 1)),
                                          ("dualpipe_v", None), ("1f1b", (1, 1, 1, 1, 9))])
def test_p2_ranks_have_the_layers_of_their_stages_in_the_model_s_order(pool, name, weights):
    """Megatron-LM#1584: with virtual stages counts and offsets came from two formulas."""
    outcomes = pool(2).run(layers_here, SCHEDULES[name](2, 4), weights)
    stages = dict(sorted(each for stages, _ in outcomes for each in stages))
    assert [layer for layers in stages.values() for layer in layers] == list(range(5))
    for mine, held in outcomes:
        assert held == [str(i) for i in sorted(layer for _, layers in mine for layer in layers)]


def tables(group, p):
    """The tied table on this rank after three steps, where it has one."""
    orders = one_f_one_b(p, 3)
    model = pipeline.cut(model_of(), group, orders)
    if model.lm_head is not None:
        model.embed_tokens.weight.data += group.rank()  # a rank that has begun from other weights
        pipeline._share_ends(model, model.pipeline)
    elif model.embed_tokens is not None:
        pipeline._share_ends(model, model.pipeline)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        execute.run(model, orders, parts_of(6, 3))
        grads.finish(model)
        grads.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return None if model.embed_tokens is None else model.embed_tokens.weight.detach()


@pytest.mark.parametrize("p", [2, 4])
def test_p3_a_tied_embedding_stays_one_on_first_and_last_rank(pool, p):
    """piper#13, Megatron-LM#299: each copy went its own way."""
    plain = model_of()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for _ in range(3):
        plain.loss(*batch(6)).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    first, *middle, last = pool(p).run(tables, p)
    assert torch.equal(first, last) and middle == [None] * (p - 2)
    assert torch.allclose(first, plain.embed_tokens.weight, rtol=0, atol=1e-9)


def scaled(group, whole, microbatches, name):
    orders = SCHEDULES[name](group.size(), microbatches)
    model = pipeline.cut(model_of(), group, orders)
    loss = execute.run(model, orders, parts_of(8, microbatches))
    grads.finish(model)
    return loss.item(), apart(model, whole)


@pytest.mark.parametrize("name,microbatches", [("1f1b", 1), ("gpipe", 4), ("zero_bubble", 8), ("dualpipe_v", 8)])
def test_d9_gradients_have_one_scale_whatever_the_number_of_micro_batches(pool, name, microbatches):
    """torchtitan#2972, AReaL#1273: with a pipeline 4 or 8 times as large, or as small."""
    with torch.no_grad():
        loss = model_of().loss(*batch(8)).item()
    for ours, difference in pool(2).run(scaled, whole_gradients(), microbatches, name):
        assert ours == pytest.approx(loss, rel=1e-12) and difference < 1e-12


def accumulated(group, whole, runs):
    """Eight micro-batches in several runs of the pipeline."""
    parts = parts_of(8, 8)
    orders = one_f_one_b(group.size(), len(parts) // runs)
    model = pipeline.cut(model_of(), group, orders)
    valid = valid_tokens(labels for _, labels in parts)
    for i in range(0, len(parts), len(parts) // runs):
        execute.run(model, orders, parts[i : i + len(parts) // runs], valid)
    grads.finish(model)
    return apart(model, whole)


@pytest.mark.parametrize("runs", [1, 4])
def test_d10_several_runs_add_up(pool, runs):
    """torchtitan#1733: what had been accumulated was divided again by each."""
    assert max(pool(2).run(accumulated, whole_gradients(), runs)) < 1e-12


def most_held(group, name, microbatches):
    """Bytes that a step had alive at most."""
    orders = SCHEDULES[name](group.size(), microbatches)
    model = pipeline.cut(model_of(), group, orders)
    parts = [(batch(1)[0], batch(7)[0][-1:])] * microbatches
    execute.run(model, orders, parts)  # gradients are there
    with Live() as live:
        execute.run(model, orders, parts)
    return live.peak


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble", "interleaved", "dualpipe_v"])
def test_p7_what_is_held_does_not_grow_with_the_number_of_micro_batches(pool, name):
    """marin#6532: weight gradients were kept for each micro-batch."""
    few, many = (pool(2).run(most_held, name, m) for m in (8, 24))
    assert few == many and min(few) > 0


def test_p7_gpipe_s_does(pool):
    few, many = (pool(2).run(most_held, "gpipe", m) for m in (8, 24))
    assert all(2.5 * a < b < 3.1 * a for a, b in zip(few, many, strict=True))


def large(group, name):
    """Messages of 1 MiB, which no library takes before the receiver has asked for them."""
    spec = ModelSpec(hidden=256, layers=8, heads=1, kv_heads=1, head_dim=16, ffn=16, vocab=53)
    orders = SCHEDULES[name](4, 8)
    model = pipeline.cut(Transformer(spec), group, orders)
    tokens = torch.zeros(64, 16, dtype=torch.long)
    return execute.run(model, orders, [(tokens, tokens)] * 8).isfinite().item()


@pytest.mark.parametrize("transport", ["backend", SHM])
def test_c3_messages_of_any_size_do_not_wait_for_each_other(transport):
    """pytorch#109401, PiPPy#1088, pytorch#172668: sends and receives interleaved so that ranks wait in a circle."""
    def run(group):
        with comm.use(transport=transport):
            return [large(group, name) for name in ("1f1b", "interleaved", "dualpipe_v")]

    assert launch(run, 4, timeout=20) == [[True] * 3] * 4


class Poisoned:
    """A handle whose message is spoilt as soon as it is gone, and no earlier."""

    def __init__(self, handle, sent):
        self.handle, self.sent = handle, sent

    def wait(self):
        self.handle.wait()
        self.sent.fill_(math.nan)


def with_poison(group, whole, name, transport):
    orders, send = SCHEDULES[name](group.size(), 8), execute.send
    model = pipeline.cut(model_of(), group, orders)
    execute.send = lambda x, *args, **how: Poisoned(send(x, *args, **how), x)
    late = group.size() - 1 - group.rank()
    try:
        with comm.use(transport=transport, debug=True):  # which raises where a message is changed before its wait
            time.sleep(0.05 * late)
            loss = execute.run(model, orders, parts_of(8, 8))
        grads.finish(model)
    finally:
        execute.send = send
    return loss.item(), apart(model, whole)


@pytest.mark.parametrize("transport", ["backend", SHM])
@pytest.mark.parametrize("name", ["1f1b", "zero_bubble", "dualpipe_v"])
def test_c5_what_is_sent_is_left_alone_until_it_is_gone_and_not_used_after(pool, name, transport):
    """Megatron-LM#4047: buffers were freed after isend, before its wait."""
    for loss, difference in pool(3 if name == "1f1b" else 2).run(with_poison, whole_gradients(), name, transport):
        assert math.isfinite(loss) and difference < 1e-12


SWAPPED = [[F(0, 0), Action("send F", 0, 0), F(0, 1), Action("send F", 0, 1)],
           [Action("recv F", 0, 1), Action("recv F", 0, 0), F(1, 0), F(1, 1)]]


def unchecked(group):
    model = pipeline.cut(model_of(), group)
    execute.check = lambda orders: None
    return execute.logits(model, SWAPPED, [tokens for tokens, _ in parts_of(2, 2)])


@pytest.mark.parametrize("how", [dict(debug=True), pytest.param(dict(transport="shm"), marks=SHM.marks)])
def test_c6_two_receives_that_are_swapped_are_found(how):
    """pytorch#63486: messages of one shape are matched by their order, and one micro-batch lands as another."""
    with pytest.raises(ValueError, match=r"deadlock.*rank 0 at send F of stage 0, micro-batch 0, rank 1 at recv F of "
                                         r"stage 0, micro-batch 1"):
        check(SWAPPED)

    def run(group):
        with comm.use(**how):
            return unchecked(group)

    with pytest.raises(RankError) as raised:
        launch(run, 2, timeout=20)
    first = str(raised.value).split("│")[0]
    assert "rank 1 of 2 raised ValueError" in first
    assert "F of stage 0, micro-batch 0" in first and "F of stage 0, micro-batch 1" in first


def falls(group):
    """The second of three stages raises in its second micro-batch."""
    orders = one_f_one_b(3, 6)
    model = pipeline.cut(model_of(), group, orders)
    seen = []

    def fall(*_):
        seen.append(0)
        if len(seen) == 2:
            raise ValueError(f"fell at {time.monotonic()}")

    if group.rank() == 1:
        next(iter(model.layers.values())).register_forward_hook(fall)
    execute.run(model, orders, parts_of(6, 6))


@pytest.mark.parametrize("transport", ["backend", SHM])
def test_p9_a_stage_that_raises_ends_all_ranks_with_its_error(transport):
    """torchgpipe's test_exception_no_hang: its neighbours were left waiting."""
    def run(group):
        with comm.use(transport=transport):
            falls(group)

    before = family()
    with pytest.raises(RankError) as raised:
        launch(run, 3)
    assert "rank 1 of 3 raised ValueError: fell at " in str(raised.value)
    assert time.monotonic() - float(str(raised.value).split("fell at ")[1].split()[0]) < 10
    assert eventually(lambda: family() <= before)


def stands(group):
    """Rank 0 stands still in its fourth micro-batch."""
    orders = forward_only(2, 5)
    model = pipeline.cut(model_of(), group, orders)
    seen = []

    def stand(*_):
        seen.append(0)
        if len(seen) == 4:
            time.sleep(60)

    if group.rank() == 0:
        model.embed_tokens.register_forward_hook(stand)
    execute.run(model, orders, parts_of(5, 5))


def stays_away(group):
    orders = gpipe(2, 2)
    model = pipeline.cut(model_of(), group, orders)
    if group.rank() == 0:
        time.sleep(60)
    execute.run(model, orders, parts_of(4, 2))


@pytest.mark.parametrize("fn,microbatch", [(stands, 3), (stays_away, 0)])
def test_a_rank_that_others_wait_for_is_told_with_the_message_that_does_not_come(fn, microbatch):
    launch(lambda group: None, 1)
    with pytest.raises(RankTimeout) as raised:
        launch(fn, 2, timeout=4)
    assert f"in recv from rank 0, tag F of stage 0, micro-batch {microbatch} float64 (" in str(raised.value)


def test_p2_rank_r_of_interleaved_has_stages_r_and_r_plus_p():
    assert placement(interleaved(3, 3, 3)) == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
