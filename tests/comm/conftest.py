"""Fixtures of the tests of comm."""

import sys

import pytest

WAYS = {"backend": {}, "messages": {"algorithm": "ring"}, "shm": {"transport": "shm"}}


@pytest.fixture(params=WAYS)
def way(request):
    """What `comm.use` is given, so that the verbs go by the backend's own, by messages, and through shared memory."""
    if request.param == "shm" and sys.platform != "linux":
        pytest.skip("memory that ranks share wants Linux")
    return WAYS[request.param]
