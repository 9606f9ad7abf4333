"""α and β from measured times: found again where they are known, and refused where nothing tells them."""

import random

import pytest

from shardlab.cost.fit import fit
from shardlab.specs import LinkSpec

SIZES = (1, 1024, 65536, 2**20, 2**26)
ALPHA, BETA = 30e-6, 2e9


def times(alpha=ALPHA, beta=BETA, noise=lambda: 1.0):
    return [(n, (alpha + n / beta) * noise()) for n in SIZES]


def test_exact_times_give_alpha_and_beta_back():
    found = fit(times())
    assert (found.alpha, found.beta) == (pytest.approx(ALPHA), pytest.approx(BETA))
    assert found.residuals == pytest.approx([0] * len(SIZES), abs=1e-9)
    assert found.seconds(10**6) == pytest.approx(ALPHA + 10**6 / BETA)
    assert found.link("here") == LinkSpec(name="here", per_direction=found.beta, alpha=found.alpha,
                                          source="fitted to 5 measured times")


def test_two_sizes_are_enough_and_a_message_may_be_empty():
    found = fit([(0, 0.25), (100, 10.25)])
    assert (found.alpha, found.beta) == (pytest.approx(0.25), pytest.approx(10))


def test_a_short_message_weighs_as_much_as_a_long_one():
    """Half as long again at the longest size: by absolute squares that would drown α, of which the short ones tell."""
    slow_end = [*times()[:-1], (SIZES[-1], 1.5 * (ALPHA + SIZES[-1] / BETA))]
    found = fit(slow_end)
    assert found.alpha == pytest.approx(ALPHA, rel=0.1)
    assert found.seconds(1) == pytest.approx(ALPHA, rel=0.1)


def test_residuals_are_relative_and_signed_fitted_minus_measured():
    found = fit([(0, 1.0), (0, 2.0), (100, 2.0)])
    assert found.residuals == pytest.approx([found.seconds(0) / 1 - 1, found.seconds(0) / 2 - 1,
                                             found.seconds(100) / 2 - 1])
    assert found.residuals[0] > 0 > found.residuals[1]


def test_no_alpha_and_beta_nearby_are_closer():
    noise = random.Random(0)
    samples = times(noise=lambda: noise.uniform(0.8, 1.25))
    found = fit(samples)

    def error(alpha, beta):
        return sum(((alpha + n / beta) / t - 1) ** 2 for n, t in samples)

    best = error(found.alpha, found.beta)
    assert best == pytest.approx(sum(r**2 for r in found.residuals))
    for a in (0.95, 1, 1.05):
        for b in (0.95, 1, 1.05):
            assert best <= error(found.alpha * a, found.beta * b)


def test_alpha_is_not_below_zero():
    """100 and 200 B in 1 and 4 s would want α = −2 s. With α = 0 it is one over β of 0.0168 s a byte."""
    found = fit([(100, 1.0), (200, 4.0)])
    assert found.alpha == 0
    assert found.beta == pytest.approx((100**2 + 50**2) / (100 + 50))
    assert found.link("no alpha").alpha is None


@pytest.mark.parametrize(("samples", "message"), [
    ([], r"two sizes at least, not of \[\] bytes: measure more sizes"),
    ([(8, 1.0)], r"two sizes at least, not of \[8.0\] bytes"),
    ([(8, 1.0), (8, 2.0)], r"two sizes at least, not of \[8.0\] bytes"),
    ([(8, 1.0), (-8, 2.0)], r"not of \[-8.0, 8.0\] bytes"),
    ([(8, 1.0), (16, 0.0)], "seconds must be a number above 0, not 0.0"),
    ([(8, 1.0), (16, 1.0)], "the times don't grow from 8 to 16 bytes.*measure larger sizes"),
    ([(8, 2.0), (16, 1.0)], "the times don't grow from 8 to 16 bytes"),
])
def test_what_tells_nothing_is_refused(samples, message):
    with pytest.raises(ValueError, match=message):
        fit(samples)
