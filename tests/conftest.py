"""Fixtures of the whole suite."""

import pytest
from checkpoints import tiny  # noqa: F401  a fixture of every test

from shardlab.launch import ranks


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
