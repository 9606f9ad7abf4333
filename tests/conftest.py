"""Fixtures of the whole suite."""

import pytest
import torch
from checkpoints import tiny  # noqa: F401  a fixture of every test
from hypothesis import settings

from shardlab.launch import ranks

settings.register_profile("any machine", deadline=None)  # how long an example takes is a busy machine's to say
settings.load_profile("any machine")
torch.set_num_threads(1)  # models here are small, and threads on a busy machine wait for each other more than they help


@pytest.fixture(scope="session")
def pool():
    """`pool(p)`: p ranks that stay alive for the session; `pool(p).run(fn, *args)` gives the results in rank order."""
    open_pools = {}

    def of(p):
        if p not in open_pools:
            open_pools[p] = ranks(p, timeout=120).__enter__()
        return open_pools[p]

    yield of
    for each in open_pools.values():
        each.__exit__(None, None, None)
