"""Learning rates over a run: their shape, and what the loop makes of them."""

from functools import partial

import pytest
import torch

from shardlab.model import Transformer, initialise
from shardlab.specs import ModelSpec
from shardlab.train import Batches, rates, text, train

SPEC = ModelSpec(hidden=16, layers=1, heads=2, kv_heads=1, head_dim=4, ffn=11, vocab=256, tied=True)
SHAPES = {"cosine": partial(rates.cosine, steps=100, warmup=10, least=0.1),
          "stable": partial(rates.stable, steps=100, warmup=10, decay=20, least=0.1)}


@pytest.mark.parametrize("name", SHAPES)
def test_it_climbs_to_one_and_falls_to_the_least(name):
    factors = [SHAPES[name](step) for step in range(120)]
    assert factors[:10] == pytest.approx([0.1 * n for n in range(1, 11)])
    assert factors[10] == 1 and factors[100:] == pytest.approx([0.1] * 20)
    assert factors[10:101] == sorted(factors[10:101], reverse=True) and factors[99] > 0.1


def test_a_cosine_is_half_way_down_in_its_middle_and_stable_is_stable():
    assert SHAPES["cosine"](55) == pytest.approx(0.55)
    assert {SHAPES["stable"](step) for step in range(10, 81)} == {1.0}
    assert SHAPES["stable"](90) == pytest.approx(0.55)
    assert rates.cosine(0, 10) == rates.stable(0, 10) == rates.stable(9, 10) == 1


@pytest.mark.parametrize("rate", [partial(rates.cosine, steps=10, warmup=10), partial(rates.cosine, steps=0),
                                  partial(rates.stable, steps=10, warmup=5, decay=6), partial(rates.cosine, steps=10,
                                                                                             least=1.5)])
def test_what_does_not_fit_into_the_steps_is_refused(rate):
    with pytest.raises(ValueError, match="warm-up"):
        rate(3)


def run(numbers, state=None, rate=None):
    """Steps with two groups of their own rates: the rates after each, and the optimizer."""
    model, seen = initialise(Transformer(SPEC), seed=3).double(), []
    groups = [{"params": [model.embed_tokens.weight], "lr": 0.02},
              {"params": [*model.layers.parameters(), *model.norm.parameters()]}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    if state is not None:
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
    batches = Batches(text()[:400], seq=8, batch=4)
    steps = train(model, optimizer, batches, numbers, progress=False, rate=rate,
                  after=lambda *_: seen.append([group["lr"] for group in optimizer.param_groups]))
    return seen, steps, (model.state_dict(), optimizer.state_dict())


def test_each_group_gets_its_own_rate_times_the_factor_and_a_resumed_run_goes_on_with_them():
    rate = partial(rates.cosine, steps=6, warmup=2)
    seen, steps, _ = run(range(6), rate=rate)
    assert seen == [pytest.approx([0.02 * rate(n), 0.1 * rate(n)]) for n in range(6)]
    *_, state = run(range(3), rate=rate)
    again, rest, _ = run(range(3, 6), state, rate)
    assert again == seen[3:] and rest == steps[3:]
    flat, *_ = run(range(2))
    assert flat == [[0.02, 0.1]] * 2
