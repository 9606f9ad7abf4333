"""Which ranks share a node, and the link between any two."""

import pytest

from shardlab.specs import ClusterSpec, LinkSpec, Topology, find_link

FAST, SLOW = LinkSpec(name="fast", per_direction=1e9), LinkSpec(name="slow", per_direction=1e6, alpha=0.02)
TWO = Topology(nodes=2, per_node=3, between=SLOW, inside=FAST)


def test_nodes_are_filled_in_order():
    assert TWO.ranks == 6
    assert [TWO.node(rank) for rank in range(6)] == [0, 0, 0, 1, 1, 1]


def test_a_link_is_the_nodes_or_the_networks_and_none_to_oneself():
    assert TWO.link(0, 2) == TWO.link(5, 4) == FAST
    assert TWO.link(2, 3) == TWO.link(5, 0) == SLOW
    assert TWO.link(4, 4) is None
    assert Topology(nodes=2, per_node=2, between=SLOW).link(0, 1) is None
    assert TWO.nic == "node"


def test_a_cluster_is_a_topology_with_a_nic_for_each_card():
    cluster = ClusterSpec.of("h100", 24)
    topology = cluster.topology
    assert (topology.nodes, topology.per_node, topology.ranks, topology.nic) == (3, 8, 24, "rank")
    assert topology.link(0, 7) == find_link("nvlink4") and topology.link(7, 8) == find_link("ib-ndr")


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Topology(nodes=0, per_node=1, between=SLOW), "nodes must be a whole number of at least 1, not 0"),
    (lambda: Topology(nodes=2, per_node=1.5, between=SLOW), "per_node must be a whole number of at least 1, not 1.5"),
    (lambda: Topology(nodes=2, per_node=1, between="ib-ndr"), "between must be a link, not 'ib-ndr': find_link"),
    (lambda: Topology(nodes=2, per_node=1, between=None), "between must be a link, not None"),
    (lambda: Topology(nodes=2, per_node=1, between=SLOW, inside=9), "inside must be a link, not 9"),
    (lambda: Topology(nodes=2, per_node=4, between=SLOW, nic="port"),
     r"nic must be 'node' \(one NIC for the 4 ranks of a node\) or 'rank' \(one each\), not 'port'"),
    (lambda: TWO.node(6), "no rank 6 on 2 nodes of 3: the last is 5"),
    (lambda: TWO.link(0, -1), "rank must be a whole number of at least 0, not -1"),
])
def test_what_makes_no_sense_is_refused_with_its_numbers(make, message):
    with pytest.raises(ValueError, match=message):
        make()
