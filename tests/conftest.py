"""Fixtures of the whole suite."""

import pytest
import torch
from checkpoints import tiny  # noqa: F401  a fixture of every test
from hypothesis import settings

from shardlab.launch import ranks

settings.register_profile("any machine", deadline=None)  # how long an example takes is a busy machine's to say
settings.load_profile("any machine")
torch.set_num_threads(1)  # models here are small, and threads on a busy machine wait for each other more than they help

MANY = 10  # process groups, each with a thread of gloo's that looks around 100 times a second for as long as ranks live
FEW = 4  # ranks: more are ended, for that reason, as soon as others are asked for


def groups(group):
    """How many process groups a rank is in."""
    return len(torch.distributed.distributed_c10d._world.pg_map)


@pytest.fixture(scope="session")
def pool():
    """`pool(p)`: p ranks that stay from test to test; `pool(p).run(fn, *args)` gives the results in rank order."""
    open_pools = {}

    def of(p):
        for other in [each for each in open_pools if each > FEW and each != p]:
            open_pools.pop(other).close()
        if p in open_pools and open_pools[p].run(groups)[0] > MANY:
            open_pools.pop(p).close()
        if p not in open_pools:
            open_pools[p] = ranks(p, timeout=120).__enter__()
        return open_pools[p]

    yield of
    for each in open_pools.values():
        each.__exit__(None, None, None)
