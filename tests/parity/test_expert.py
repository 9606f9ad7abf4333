"""Expert parallelism against the plain model: every rank's gradients, norm, losses, loads and weights, step by step."""

import pytest
import torch
from mixtures import KINDS, batch, build, cut, parity, passes

from shardlab import comm
from shardlab.parallel import balance, grads
from shardlab.parallel.loss import valid_tokens


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "late"])  # which is for deeper models
@pytest.mark.parametrize("ranks", [2, 4])
def test_cut_experts_are_the_plain_ones(pool, ranks, kind):
    """FAULTS E1, E3, E4: and the same on 1, 2 and 4 ranks, for one plain training is the measure of all."""
    parity(pool, kind, ranks, "adamw", steps=5 if kind in ("dropless", "deepseek") else 3)


@pytest.mark.parametrize("kind", ["deepseek", "weight", "padded", "all to one"])
def test_momentum_and_weights_that_do_not_decay(pool, kind):
    parity(pool, kind, 2, "sgd", steps=2)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("kind", ["balanced", "position", "only the last", "empty"])
def test_experts_that_compute_again(pool, kind, recompute):
    """FAULTS E7: what is chosen is chosen once, and counted once; loads and balance are the plain model's."""
    parity(pool, kind, 2, steps=2, recompute=recompute)


@pytest.mark.parametrize("kind", ["deepseek", "skewed, full", "all to one", "empty"])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.more)])
def test_through_shared_memory(pool, ranks, kind):
    parity(pool, kind, ranks, steps=2, transport="shm")


@pytest.mark.parametrize("transport", ["backend", "shm"])
def test_in_float32(pool, transport):
    parity(pool, "deepseek", 2, steps=2, transport=transport, dtype=torch.float32)


def test_in_debug_mode(pool):
    parity(pool, "padded", 2, steps=1, debug=True)


@pytest.mark.parametrize("kind", ["deepseek", "skewed"])
def test_a_bias_that_evens_loads_is_the_same_on_all_ranks(pool, kind):
    """Moved after each step by the loads of all ranks' tokens."""
    steps = parity(pool, kind, 2, rate=0.05, steps=3)
    first, last = (step[3].double() for step in (steps[0], steps[-1]))
    assert not torch.equal(first, last)


def test_on_one_rank_the_model_is_the_plain_one(pool):
    parity(pool, "deepseek", 1, steps=1)


def of_16_bits(group, dtype):
    """The loss of all tokens, and the loads of the first layer with experts; every gradient is there and finite."""
    twin, _, tokens = cut(group, "deepseek", dtype=dtype)
    parts, routed = batch(0), []
    valid = valid_tokens(labels for _, labels, _ in parts)
    total = passes(twin, parts[tokens.rank() :: tokens.size()], valid, None, routed)
    grads.finish(twin)
    trained = [p for name, p in twin.named_parameters() if p.requires_grad and "unused" not in name]
    assert all(p.grad.isfinite().all() for p in trained)
    return comm.all_reduce(total, group=tokens).item(), balance.loads(twin, routed, tokens)[0][0].tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits(pool, dtype):
    """Rounded once more, tokens go where they go in the plain model."""
    plain, parts, routed = build(**KINDS["deepseek"], dtype=dtype), batch(0), []
    valid = valid_tokens(labels for _, labels, _ in parts)
    expected = sum(plain.loss(tokens, labels, valid, routed, real).item() for tokens, labels, real in parts)
    for loss, loads in pool(2).run(of_16_bits, dtype):
        assert loss == pytest.approx(expected, rel=2e-2)
        assert loads == balance.loads(plain, routed)[0][0].tolist()
