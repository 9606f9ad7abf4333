"""Every row of tests/data/facts.yaml, computed by the library; what is often said is held against it."""

from collections import Counter

import facts_caches
import facts_collectives
import facts_cutting
import facts_data
import facts_experts
import facts_hardware
import facts_layouts
import facts_pipeline
import facts_replicas
import facts_serving
import facts_sizes
import facts_training
import pytest
from facts import ROWS

PARTS = (facts_sizes, facts_caches, facts_training, facts_hardware, facts_cutting, facts_collectives, facts_data,
         facts_replicas, facts_pipeline, facts_experts, facts_layouts, facts_serving)
COMPUTED = {name: compute for part in PARTS for name, compute in part.COMPUTED.items()}


def test_every_row_is_computed_once():
    times = Counter(name for part in PARTS for name in part.COMPUTED)
    assert set(times) == set(ROWS)
    assert set(times.values()) == {1}


@pytest.mark.parametrize("name", COMPUTED)
def test_the_library_computes_the_row(name):
    row, value = ROWS[name], COMPUTED[name]()
    assert value == pytest.approx(row["expected"], rel=max(row["rel_tol"], 1e-12))
    if "claimed" in row and row["verdict"] != "assumption":
        agrees = value == pytest.approx(row["claimed"], rel=row.get("claimed_tol", 0.05))
        assert agrees == (row["verdict"] != "wrong")
