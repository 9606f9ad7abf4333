"""Data parallelism against the plain model: every rank's gradients, norm, losses and weights, step by step."""

import pytest
import torch
from replicas import BUCKET, OPTIMIZERS, backward, batch, build, check, compare, distance, twins

from shardlab import comm
from shardlab.parallel import data, grads

WORLDS = [2, 3, 4]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("p", WORLDS)
def test_replicas_are_the_plain_model(pool, p, optimizer):
    check(pool(p).run(compare, 0, optimizer))


@pytest.mark.parametrize("p", WORLDS)
def test_replicas_are_the_plain_model_through_shared_memory(pool, p):
    check(pool(p).run(compare, 0, transport="shm"))
