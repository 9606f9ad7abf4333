"""A step's time from a log: coefficients found again, published fits, and what a log can't tell."""

import random

import pytest

from shardlab.cost import StepFit, fit_steps
from shardlab.cost.step_fit import _least_squares

TRUE = (4e-3, 8e-6, 2e-8, 3e-11)
SPLITWISE = {  # Llama-2-70b, TP8, medians of prompts alone (perf_model.csv, MIT): tokens → ms
    "a100": {512: 94, 1024: 155, 2048: 274, 4096: 661, 8192: 1550},
    "h100": {512: 53, 1024: 78, 2048: 137, 4096: 390, 8192: 845}}


def log(seconds, steps=200, seed=1):
    chance = random.Random(seed)
    for _ in range(steps):
        work = [(1, chance.randint(1, 8000)) for _ in range(chance.randint(0, 64))]
        if chance.random() < 0.5 or not work:
            new = chance.randint(1, 2000)
            work.append((new, new + chance.choice([0, 0, 3000])))
        yield work, seconds(work)


def test_exact_times_give_the_four_numbers_back():
    found = fit_steps(log(StepFit(TRUE, ())))
    assert found.coefficients == pytest.approx(TRUE, rel=1e-6)
    assert found.residuals == pytest.approx([0] * 200, abs=1e-9) and found.error < 1e-9


def test_half_a_noisy_run_predicts_the_other_half():
    chance, true = random.Random(7), StepFit(TRUE, ())
    found = fit_steps(log(lambda work: true(work) * chance.uniform(0.9, 1.1)))
    assert 0.01 < found.error < 0.08
    assert all(found(work) == pytest.approx(seconds, rel=0.05) for work, seconds in log(true, seed=2))


def test_distserves_prefill_comes_out_as_published():
    """OPT-13B on an A100, ms = 18.10 + 0.10191 Σ n + 7.122e-6 Σ n² (arXiv:2401.09670's code)."""
    prompts = [[n] for n in (64, 128, 512, 1024, 2000)] + [[100, 400], [900, 900, 30]]
    found = fit_steps(([(n, n) for n in each], 18.10 + sum(0.10191 * n + 7.122e-6 * n * n for n in each))
                      for each in prompts)
    assert found.coefficients == pytest.approx((18.10, 0.10191, 0, 7.122e-6), rel=1e-6)


def test_distserves_decode_too_and_the_bend_at_95_is_no_line():
    def published(work):
        few = len(work) < 95
        a, ctx, each = (19.93, 6.27e-4, 0.0385) if few else (7.17, 5.80e-4, 0.158)
        return a + ctx * sum(context for _, context in work) + each * len(work)

    steps = [[(1, c)] * b for c in (50, 400, 1500) for b in (1, 4, 16, 64, 90)]
    found = fit_steps((work, published(work)) for work in steps)
    assert found.coefficients == pytest.approx((19.93, 0.0385, 6.27e-4, 0), rel=1e-6)
    over = [[(1, c)] * b for c in (50, 400) for b in (1, 64, 96, 200)]
    assert max(map(abs, fit_steps((work, published(work)) for work in over).residuals)) > 0.02


@pytest.mark.parametrize("card", SPLITWISE)
def test_splitwises_prompts_have_the_shape(card):
    found = fit_steps(([(n, n)], ms) for n, ms in SPLITWISE[card].items())
    a, b, c, d = found.coefficients
    assert a > 0 and b > 0 and c == 0 and d > 0
    assert found.error < 0.06 and max(map(abs, found.residuals)) < 0.25


def test_decodes_alone_say_nothing_of_a_prompts_square():
    found = fit_steps(([(1, c)] * b, 1 + 0.1 * b + 0.01 * b * c) for c in (1, 5, 9) for b in (1, 2, 7))
    assert found.coefficients == pytest.approx((1, 0.1, 0.01, 0))
    chance = random.Random(5)
    decodes = [[(1, chance.randint(1, 8000)) for _ in range(chance.randint(1, 64))] for _ in range(50)]
    noisy = fit_steps((work, StepFit(TRUE, ())(work) * chance.uniform(0.95, 1.05)) for work in decodes)
    assert noisy.coefficients[3] == 0 < noisy.coefficients[2] < 1e-6
    for _ in range(20):  # what the first two make up gets nothing, whatever is left of it by rounding
        one, other = ([chance.random() for _ in range(30)] for _ in range(2))
        assert _least_squares([one, other, [x / 3 + y / 7 for x, y in zip(one, other, strict=True)]])[2] == 0
    same = fit_steps(([(1, 10)] * b, 1 + 0.2 * b) for b in (1, 2, 7))  # nor, of one length, of contexts
    assert same.coefficients == pytest.approx((1, 0.2, 0, 0))


def test_no_coefficient_is_below_nothing():
    found = fit_steps([([(1, 1)], 3.0), ([(10, 10)], 2.0), ([(100, 100)], 2.5)])
    assert min(found.coefficients) >= 0 and found.coefficients[0] > 0


def test_it_says_how_far_it_is_off():
    found = fit_steps([([(1, 1)], 1.0), ([(2, 2)], 2.0), ([(3, 3)], 3.6), ([(50, 50)], 50)])
    assert found.footnotes == [f"off by {100 * found.error:.1f}% in the median, "
                               f"{100 * max(found.residuals, key=abs):+.1f}% at worst"]
    assert found.to_dict()["coefficients"] == list(found.coefficients) and "a new token" in str(found)


@pytest.mark.parametrize(("wrong", "said"), [
    ([], "the log has 0"), ([([(1, 1)], 1.0), ([(1, 1)], 2.0)], "the log has 1: log more of them"),
    ([([(1, 1)], 0.0), ([(2, 2)], 1.0)], "seconds must be a number above 0")])
def test_what_tells_nothing_is_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        fit_steps(wrong)
