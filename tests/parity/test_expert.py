"""Expert parallelism against the plain model: every rank's gradients, norm, losses, loads and weights, step by step."""

import pytest
from mixtures import KINDS, parity


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_cut_experts_are_the_plain_ones(pool, ranks, kind):
    """FAULTS E1, E3, E4: and the same on 1, 2 and 4 ranks, for one plain training is the measure of all."""
    parity(pool, kind, ranks, "adamw")
