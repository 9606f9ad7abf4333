"""Emulated links: messages wait as long as the topology says, and collectives as long as `cost` predicts.

The only timed tests there are. Delays are long enough to drown a busy machine's noise; times are medians of a few.
"""

import statistics
import sys
import time

import pytest
import torch

from shardlab import comm
from shardlab.comm import links
from shardlab.comm.algorithms import TABLE
from shardlab.cost import fit, messages, transfer_seconds
from shardlab.launch import launch
from shardlab.specs import LinkSpec, Topology

linux = pytest.mark.skipif(sys.platform != "linux", reason="memory that ranks share wants Linux")


# what is booked: no rank, no waiting


@pytest.fixture
def cards(tmp_path):
    """The same cards, as two processes see them."""
    both = [links.Nics(tmp_path / "nics") for _ in range(2)]
    yield both
    for each in both:
        each._file.close()  # a rank has it open as long as it lives


@pytest.fixture
def booked(cards, monkeypatch):
    """Seconds until a message has left and has come, if it is sent now: booked(topology, src, dst, nbytes)."""
    monkeypatch.setattr(links, "_nics", cards[0])
    start = time.monotonic()

    def book(topology, src, dst, nbytes):
        return [pytest.approx(when - start, abs=10) for when in links.book(topology, src, dst, nbytes)]

    return book


SLOW = LinkSpec(name="slow", per_direction=1.0, alpha=100.0)  # a byte a second: 1,000 B are 1,000 s


def pair(**more):
    return Topology(nodes=2, per_node=2, between=SLOW, **more)


def test_a_message_leaves_after_its_bytes_and_comes_alpha_later(booked):
    assert booked(pair(), 0, 2, 1000) == [1000, 1100]
    assert booked(pair(nic="rank"), 1, 3, 0) == [0, 100]  # no bytes still take α
    no_alpha = Topology(nodes=2, per_node=2, between=LinkSpec(name="x", per_direction=2.0), nic="rank")
    assert booked(no_alpha, 1, 2, 1000) == [500, 500]


def test_one_card_a_node_is_shared_first_come_first_served_each_direction_on_its_own(booked):
    topology = pair()
    assert booked(topology, 0, 2, 1000) == [1000, 1100]
    assert booked(topology, 1, 3, 500) == [1500, 1600]  # waits for the first, from another rank to another
    assert booked(topology, 2, 0, 700) == [700, 800]  # the other direction is free
    assert booked(topology, 3, 1, 100) == [800, 900]
    assert booked(topology, 0, 2, 10) == [1510, 1610]


def test_with_a_card_a_rank_nobody_waits_for_its_neighbour(booked):
    topology = pair(nic="rank")
    assert booked(topology, 0, 2, 1000) == [1000, 1100]
    assert booked(topology, 1, 3, 1000) == [1000, 1100]
    assert booked(topology, 1, 2, 100) == [1100, 1200]  # its own way out, and the receiver's way in, are busy
    assert booked(topology, 3, 0, 100) == [100, 200]


def test_two_nodes_that_send_to_a_third_share_its_way_in(booked):
    topology = Topology(nodes=3, per_node=1, between=SLOW)
    assert [booked(topology, src, 2, 1000)[0] for src in (0, 1)] == [1000, 2000]
    assert booked(topology, 0, 1, 100) == [1100, 1200]


def test_inside_a_node_nothing_is_slowed_unless_there_is_a_link(booked):
    assert links.book(pair(), 0, 1, 10**12) == (0, 0)
    inside = pair(inside=LinkSpec(name="inside", per_direction=10.0, alpha=1.0))
    assert booked(inside, 0, 1, 1000) == [100, 101]
    assert booked(inside, 0, 2, 1000) == [1000, 1100]  # by another card
    assert booked(inside, 1, 0, 1000) == [100, 101]
    assert booked(inside, 0, 1, 1000) == [200, 201]


def test_cards_are_those_of_all_processes_that_share_the_file(cards):
    one, other = cards
    first = one.book((0, 300), 1000)
    assert other.book((0, 301), 1000) == first + 1000 == other.book((2, 300), 0) + 1000


def test_links_are_only_slowed_between_ranks_of_one_launch(monkeypatch):
    monkeypatch.setattr(links, "_nics", None)
    with pytest.raises(ValueError, match=r"only between ranks that shardlab\.launch has started on one host"):
        links.book(pair(), 0, 2, 1)


# what ranks wait for


def spans(group, repeats, verb, algorithm, topology, transport="backend"):
    """[(start, end)] of this rank, seconds of the clock that all processes of the host share."""
    out = []
    for _ in range(repeats):
        comm.barrier(group)
        start = time.monotonic()
        with comm.use(algorithm, topology=topology, transport=transport):
            verb(group)
        out.append((start, time.monotonic()))
    return out


def seconds(ranks, *args, repeats=3):
    """Median of the times from the first rank that starts to the last that ends."""
    runs = zip(*ranks.run(spans, repeats, *args), strict=True)
    return statistics.median(max(end for _, end in run) - min(start for start, _ in run) for run in runs)


def test_alpha_and_beta_fitted_to_an_emulated_link_are_its_own_and_tell_other_sizes():
    link = LinkSpec(name="slow", per_direction=20e6, alpha=0.06)
    topology = Topology(nodes=2, per_node=1, between=link)

    def measure(group):
        sizes = [1_000, 2_000_000], [500_000, 1_500_000]
        return [comm.half_round_trips(group, some, repeats=5) for some in sizes]

    (fitted_to, others), same = launch(measure, 2, topology=topology)
    assert (fitted_to, others) == tuple(same)
    fitted = fit(fitted_to)
    assert fitted.alpha == pytest.approx(0.06, rel=0.1) and fitted.beta == pytest.approx(20e6, rel=0.1)
    for nbytes, measured in others:
        assert fitted.seconds(nbytes) == pytest.approx(measured, rel=0.1)


N = 50_000  # float32: 200 kB, at 2 MB/s 100 ms
CALLS = {  # elements that one rank hands in, and the call
    "all_reduce": (N, lambda x, g: comm.all_reduce(x, group=g)),
    "all_gather": (N, comm.all_gather),
    "reduce_scatter": (4 * N, lambda x, g: comm.reduce_scatter(x, group=g)),
    "all_to_all": (4 * N, lambda x, g: comm.all_to_all(x, group=g)),
    "broadcast": (N, lambda x, g: comm.broadcast(x, 0, g)),
    "reduce": (N, lambda x, g: comm.reduce(x, 0, group=g)),
    "gather": (N, lambda x, g: comm.gather(x, 0, g)),
    "scatter": (4 * N, lambda x, g: comm.scatter(x[:N], None if g.rank() else x, 0, g)),
    "barrier": (0, lambda x, g: comm.barrier(g)),
}


@pytest.mark.parametrize(("verb", "algorithm"), [(verb, name) for verb in CALLS for name in TABLE[verb]
                                                 if name != "two_level"])
def test_each_algorithm_takes_as_long_as_its_messages(pool, verb, algorithm):
    alpha = 0.2 if verb == "barrier" else 0.05
    topology = Topology(nodes=4, per_node=1, between=LinkSpec(name="slow", per_direction=2e6, alpha=alpha))
    n, call = CALLS[verb]
    predicted = transfer_seconds(messages(verb, algorithm, n, 4, 4), topology)
    assert predicted > 0.29
    assert seconds(pool(4), lambda g: call(torch.ones(n), g), algorithm, topology) == pytest.approx(predicted, rel=0.2)


@pytest.mark.parametrize(("nic", "transport"), [("node", "backend"), ("rank", "backend"),
                                                pytest.param("node", "shm", marks=linux)])
def test_two_levels_beat_the_flat_ring_between_two_nodes_as_predicted(pool, nic, transport):
    link = LinkSpec(name="slow", per_direction=2e6, alpha=0.02)
    topology, n = Topology(nodes=2, per_node=2, between=link, nic=nic), 250_000  # 1 MB: 0.5 s
    predicted, measured = {}, {}
    for algorithm in ("ring", "two_level"):
        per_node = 2 if algorithm == "two_level" else None
        predicted[algorithm] = transfer_seconds(messages("all_reduce", algorithm, n, 4, 4, per_node=per_node), topology)
        measured[algorithm] = seconds(pool(4), lambda group: comm.all_reduce(torch.ones(n), group=group), algorithm,
                                      topology, transport)
    ratio = predicted["ring"] / predicted["two_level"]
    assert ratio > (1.4 if nic == "node" else 2.5)
    assert measured["ring"] / measured["two_level"] == pytest.approx(ratio, rel=0.2)
    assert measured == pytest.approx(predicted, rel=0.2)


def across(group):
    """Ranks 0 and 1 each send 0.2 s to the other node, at once."""
    other, x = (group.rank() + 2) % 4, torch.ones(100_000)
    comm.send(x, other, group) if group.rank() < 2 else comm.recv(x, other, group)


def inside(group):
    other, x = group.rank() ^ 1, torch.ones(10_000_000)  # 20 s between nodes
    comm.recv(x, other, group) if group.rank() % 2 else comm.send(x, other, group)


@pytest.mark.parametrize("nic", ["node", "rank"])
def test_who_sends_waits_for_the_card_and_who_receives_for_alpha_too(pool, nic):
    topology = Topology(nodes=2, per_node=2, between=LinkSpec(name="slow", per_direction=2e6, alpha=0.2), nic=nic)
    runs = zip(*pool(4).run(spans, 3, across, None, topology), strict=True)
    took = [[end - min(start for start, _ in run) for _, end in run] for run in runs]
    sent, come = (sorted(map(statistics.median, zip(*(sorted(each[some]) for each in took), strict=True)))
                  for some in (slice(2), slice(2, 4)))
    assert sent == pytest.approx([0.2, 0.4] if nic == "node" else [0.2, 0.2], rel=0.2)
    assert come == pytest.approx([0.4, 0.6] if nic == "node" else [0.4, 0.4], rel=0.2)


def test_inside_a_node_ranks_are_as_fast_as_without_a_topology(pool):
    topology = Topology(nodes=2, per_node=2, between=LinkSpec(name="slow", per_direction=2e6, alpha=5.0))
    assert seconds(pool(4), inside, None, topology, repeats=1) < 5
