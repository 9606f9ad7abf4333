"""Every schedule that runs against the plain model, in float64, on every rank: losses, gradients, their norm, and the
parameters after two clipped steps, or five, of plain SGD and of AdamW (which forgives a constant factor in a
gradient)."""

from itertools import product
from pipes import KINDS, check, compare, pair, parity

import pytest
import torch

from shardlab.schedule import SCHEDULES, interleaved

EXECUTED = ["gpipe", "1f1b", "zero_bubble", "interleaved", "dualpipe_v"]
FIVE = dict(steps=5)
ANY = [  # each number of micro-batches for p ranks (1, p − 1, p, 4p, no multiple of p), and each kind of stage
    (2, 1, "tied", dict(optimizer="adamw") | FIVE),
    (2, 8, "untied", dict(transport="shm", recompute="full")),
    (2, 3, "frozen last", dict(recompute="selective")),
    (3, 2, "frozen first", dict(optimizer="adamw", transport="shm") | FIVE),
    (3, 4, "no layers", dict(recompute="full")),
    (3, 12, "frozen middle", dict(optimizer="adamw")),
    (4, 3, "uneven", dict(optimizer="adamw", recompute="selective")),
    (4, 4, "no layers", dict(transport="shm") | FIVE),
    (4, 6, "all one", dict(optimizer="adamw", recompute="full")),
    (4, 16, "tied", dict()),
]
ROUNDS = [  # of interleaved, which wants multiples of p
    (2, 2, "untied", dict(optimizer="adamw", recompute="full") | FIVE),
    (2, 8, "frozen middle", dict(transport="shm")),
    (3, 3, "frozen first", dict(recompute="selective") | FIVE),
    (3, 12, "uneven", dict(optimizer="adamw", transport="shm")),
    (4, 4, "no layers", dict(optimizer="adamw") | FIVE),
    (4, 16, "tied", dict(recompute="full")),
    (4, 4, "frozen last", dict()),
]
TWICE = [  # of DualPipeV, which wants two for each rank at least
    (2, 4, "untied", dict(transport="shm", recompute="selective") | FIVE),
    (2, 8, "frozen last", dict(optimizer="adamw")),
    (3, 7, "frozen middle", dict(optimizer="adamw", recompute="full") | FIVE),
    (3, 12, "uneven", dict()),
    (4, 8, "no layers", dict(transport="shm") | FIVE),
    (4, 9, "frozen first", dict(optimizer="adamw")),
    (4, 16, "tied", dict(recompute="selective")),
]
ROWS = [*product(("gpipe", "1f1b", "zero_bubble"), ANY), *product(("interleaved",), ROUNDS),
        *product(("dualpipe_v",), TWICE)]


@pytest.mark.parametrize("name,row", ROWS, ids=lambda x: x if isinstance(x, str) else f"{x[0]}-{x[1]}-{x[2]}")
def test_a_pipeline_is_the_plain_model(pool, name, row):
    p, microbatches, kind, how = row
    parity(pool, SCHEDULES[name](p, microbatches), kind, **how)


@pytest.mark.parametrize("p,transport", [(2, "backend"), (3, "shm")])
def test_three_stages_a_rank(pool, p, transport):
    parity(pool, interleaved(p, 2 * p, 3), optimizer="adamw", transport=transport)


@pytest.mark.parametrize("name,optimizer", [*zip(EXECUTED, ["sgd", "adamw"] * 2 + ["sgd"], strict=True)])
def test_in_float32(pool, name, optimizer):
    parity(pool, SCHEDULES[name](3, 6), optimizer=optimizer, dtype=torch.float32)


@pytest.mark.parametrize("name,recompute", [("1f1b", None), ("zero_bubble", "full"), ("dualpipe_v", "selective")])
def test_what_is_dropped_at_random_is_what_the_plain_model_drops(pool, name, recompute):
    """A layer draws its numbers micro-batch by micro-batch, on whatever rank it is."""
    parity(pool, SCHEDULES[name](2, 5), dropout=0.3, recompute=recompute, steps=2)


def every(group, cases):
    return [compare(group, orders, expected, **how) for orders, expected, how in cases]


@pytest.mark.more
@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("name", EXECUTED)
def test_all_of_it(pool, name, p):
    """Every number of micro-batches with every kind of stage, of the two largest with two of them."""
    orders = []
    for microbatches in sorted({1, p - 1, p, 2 * p + 1, 4 * p}):
        try:
            orders.append(SCHEDULES[name](p, microbatches))
        except ValueError:
            continue
    for i, each in enumerate(orders):
        cases = [(each, *pair(each, kind, ("sgd", "adamw")[(i + j) % 2], 2, transport=("backend", "shm")[j % 2]))
                 for j, kind in enumerate(KINDS if i + 2 < len(orders) else ("tied", "no layers"))]
        for (_, expected, _), seen in zip(cases, zip(*pool(p).run(every, cases), strict=True), strict=True):
            check(seen, expected)
