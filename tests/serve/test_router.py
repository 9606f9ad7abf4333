"""Who gets a request: turns, the least outstanding, the longest known prefix within a bound, and chance where that says
nothing."""

from collections import Counter
from random import Random

import pytest
from clusters import Watched, fleet, requests, settled
from hypothesis import given
from hypothesis import strategies as st

from shardlab.serve import Request
from shardlab.serve.arrivals import poisson
from shardlab.serve.cluster import Cluster
from shardlab.serve.kv_cache import ROOT
from shardlab.serve.router import LeastOutstanding, PrefixAffinity, RoundRobin, apart
from shardlab.serve.simulate import Simulated
from shardlab.serve.workload import Lengths, synthetic

REQUEST = Request(0, list(range(9)), 4)


def idle(count=4, **how):
    return fleet(0, 0, count, **how)


def test_round_robin_takes_turns_within_each_pool_and_without_the_lost():
    instances, router = fleet(2, 2), RoundRobin()
    picked = [router.pick(some, REQUEST).name for _ in range(4) for some in (instances[2:], instances[:2])]
    assert picked == ["decode2", "prefill0", "decode3", "prefill1"] * 2
    assert [router.pick(instances[1:], REQUEST).name for _ in range(4)] == ["decode2", "decode3", "prefill1", "decode2"]


@pytest.mark.parametrize("kind", [LeastOutstanding, PrefixAffinity])
def test_ties_are_broken_by_chance_which_a_seed_repeats(kind):
    instances = idle()

    def picked(seed):
        router = kind(Random(seed))
        return [router.pick(instances, REQUEST).name for _ in range(400)]

    counts = Counter(picked(1))
    assert len(counts) == 4 and min(counts.values()) > 70
    assert picked(1) == picked(1) != picked(2)
    instances[0].outstanding = 1
    assert set(picked(1)) == {each.name for each in instances[1:]}  # which is no tie


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(0, 30), st.data())
def test_affinity_takes_the_longest_prefix_within_the_bound_and_the_least_of_those(loads, ahead, data):
    instances = idle(len(loads))
    prompt = list(range(20))
    for each, load in zip(instances, loads, strict=True):
        each.outstanding, blocks = load, each.pool.take(data.draw(st.integers(0, 4)))
        each.pool.keep(blocks, ROOT, prompt[: 4 * len(blocks)])
    picked = PrefixAffinity(Random(0), ahead).pick(instances, Request(0, prompt, 1))
    allowed = [each for each in instances if each.outstanding <= min(loads) + ahead]
    assert picked in allowed
    best = max((each.pool.known(prompt), -each.outstanding) for each in allowed)
    assert (picked.pool.known(prompt), -picked.outstanding) == best


def cached(router, prefixes=24):
    """(Share of the prompts' tokens that were found in a cache, the largest difference of outstanding tokens)."""
    given = synthetic(poisson(20.0, 600, 3), Lengths(120, 0.3), 8, 1000, 3, prefixes=prefixes, shared=96)
    instances, apart_by = idle(blocks=260), [0]

    def watch(instance, batch):
        outstanding = [each.outstanding for each in instances]
        apart_by.append(max(outstanding) - min(outstanding))

    world = Simulated(lambda instance, work: 0.01 + 1e-4 * sum(new for new, _ in work))
    answers = Cluster(world, instances, router, watch=watch).run(given)
    return sum(a.cached for a in answers) / sum(len(a.request.prompt) for a in answers), max(apart_by)


def test_affinity_finds_more_than_turns_do():
    turns, _ = cached(RoundRobin())
    affine, _ = cached(PrefixAffinity(Random(0), 2000))
    assert affine > 1.3 * turns


def test_the_bound_keeps_one_prefix_from_one_replica():
    largest = 400  # tokens of a request
    _, bounded = cached(PrefixAffinity(Random(0), 300), prefixes=1)
    _, unbounded = cached(PrefixAffinity(Random(0), 10**9), prefixes=1)
    assert bounded <= 300 + largest < unbounded


def test_short_prompts_are_not_sent_apart():
    cluster = Watched(fleet(1, 1, blocks=24), apart=apart(9))
    answers = cluster.run(requests([10, 9, 30]))
    settled(cluster, answers)
    assert [transfer.number for transfer in cluster.handovers.arrived] == [0, 2]


def test_what_the_decoding_side_knows_counts_as_computed():
    prompt = list(range(21))
    cluster = Watched(fleet(1, 1, blocks=24), apart=apart(9))
    settled(cluster, cluster.run([Request(0, prompt, 3), Request(1, [*prompt, 3, 3], 3, 30.0)]))
    assert [transfer.number for transfer in cluster.handovers.arrived] == [0]


@pytest.mark.parametrize("wrong", [lambda: apart(-1), lambda: PrefixAffinity(Random(0), -1)])
def test_thresholds_are_0_or_more(wrong):
    with pytest.raises(ValueError, match="at least 0, not -1"):
        wrong()
