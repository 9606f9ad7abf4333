"""Times of messages on links, worked out by hand: bytes take a second each, α mostly ten."""

import pytest

from shardlab.cost.messages import Message, messages
from shardlab.cost.transfers import seconds
from shardlab.specs import LinkSpec, Topology, find_link

SLOW = LinkSpec(name="slow", per_direction=1.0, alpha=10.0)
NEAR = LinkSpec(name="near", per_direction=2.0, alpha=1.0)
BARE = LinkSpec(name="bare", per_direction=1.0)
APART = Topology(nodes=4, per_node=1, between=SLOW)


def two_nodes(per_node=2, nic="node", between=SLOW, inside=None):
    return Topology(nodes=2, per_node=per_node, between=between, inside=inside, nic=nic)


def send(src, dst, nbytes):
    return Message(src, dst, nbytes, 0)


def test_a_message_costs_alpha_and_its_bytes():
    assert seconds([[send(0, 1, 5)]], APART) == 15
    assert seconds([[send(0, 1, 5)]], Topology(nodes=2, per_node=1, between=BARE)) == 5
    assert seconds([], APART) == seconds([[]], APART) == 0


def test_alpha_does_not_occupy_the_link():
    """The second leaves when the first has left, at 5, and arrives at 20; an answer waits for it to arrive."""
    assert seconds([[send(0, 1, 5), send(0, 1, 5)]], APART) == 5 + 5 + 10
    assert seconds([[send(0, 1, 5)], [send(0, 1, 5)]], APART) == 5 + 5 + 10
    assert seconds([[send(0, 1, 5)], [send(1, 0, 5)]], APART) == 15 + 15


def test_a_round_waits_for_what_it_needs_and_for_nothing_else():
    """Rank 3 has no part in the first round and is done at 12; rank 1 waits for rank 0's, which takes until 110."""
    slow, quick = send(0, 1, 100), send(3, 2, 2)
    assert seconds([[slow], [quick]], APART) == 110
    assert seconds([[slow], [quick], [send(2, 3, 90)]], APART) == 112
    assert seconds([[slow], [send(1, 2, 1)]], APART) == 110 + 11
    assert seconds([[slow], [send(2, 1, 99), send(1, 3, 1)]], APART) == 100 + 99 + 10  # its way in is taken till 100


def test_what_comes_early_waits_for_its_round():
    """Rank 1 sends until 100; rank 2's message is there at 13, and rank 1 goes on at 100."""
    assert seconds([[send(1, 0, 100)], [send(2, 1, 3)], [send(1, 2, 1)]], APART) == 100 + 1 + 10


def test_all_to_one_queue_at_its_way_in():
    incast = [[send(1, 0, 5), send(2, 0, 5), send(3, 0, 5)]]
    assert seconds(incast, APART) == 3 * 5 + 10
    outcast = [[send(0, 1, 5), send(0, 2, 5), send(0, 3, 5)]]
    assert seconds(outcast, APART) == 3 * 5 + 10


def test_one_nic_a_node_is_shared_and_one_a_rank_is_not():
    both = [[send(0, 2, 5), send(1, 3, 5)]]
    assert seconds(both, two_nodes(nic="node")) == 5 + 5 + 10
    assert seconds(both, two_nodes(nic="rank")) == 5 + 10
    there_and_back = [[send(0, 2, 5), send(3, 1, 5)]]  # each direction on its own
    assert seconds(there_and_back, two_nodes(nic="node")) == 15


def test_a_shared_nics_way_in_is_one_too():
    """Three nodes of two: 0 and 2 send to node 2, whose one way in takes one after the other."""
    three = {nic: Topology(nodes=3, per_node=2, between=SLOW, nic=nic) for nic in ("node", "rank")}
    incast = [[send(0, 4, 5), send(2, 5, 5)]]
    assert seconds(incast, three["node"]) == 20
    assert seconds(incast, three["rank"]) == 15
    assert seconds([[send(0, 4, 5), send(2, 4, 5)]], three["rank"]) == 20


def test_who_asks_first_goes_first():
    """Rank 0 has sent to rank 1 by 3, which has it at 4: so 0's message for the other node leaves at 3 + 4, and 1's at
    8. The other way round they would leave at 4 + 1 and 9. In one and the same second, the lower rank asks first."""
    inside = LinkSpec(name="inside", per_direction=1.0, alpha=1.0)
    topology = two_nodes(inside=inside)
    assert seconds([[send(0, 1, 3)], [send(1, 3, 1), send(0, 2, 4)]], topology) == 8 + 10
    assert seconds([[send(1, 3, 1), send(0, 2, 4)], [send(2, 0, 5)]], topology) == 4 + 10 + 5 + 10


def test_a_queue_is_not_overtaken():
    """Rank 0's second message waits behind its first, which waits for rank 1's way in, though its own way is free."""
    assert seconds([[send(2, 1, 50), send(0, 1, 5), send(0, 3, 5)]], APART) == 50 + 5 + 10
    assert seconds([[send(2, 1, 50)], [send(0, 1, 5), send(0, 3, 5)], [send(3, 0, 20)]], APART) == 60 + 10 + 20 + 10


def test_inside_a_node_each_rank_has_its_own_way():
    four = Topology(nodes=2, per_node=4, between=SLOW, inside=NEAR)
    assert seconds([[send(0, 1, 6), send(2, 3, 6)]], four) == 6 / 2 + 1
    assert seconds([[send(0, 1, 6), send(0, 2, 6)]], four) == 12 / 2 + 1
    assert seconds([[send(0, 1, 6), send(0, 4, 6)]], four) == 16  # and another to the network
    assert seconds([[send(0, 1, 10**9)]], two_nodes()) == 0  # no link inside: no time


def test_numbers_of_a_group_are_placed_on_global_ranks():
    pair = [[send(0, 1, 5)]]
    assert seconds(pair, two_nodes(inside=NEAR), ranks=[1, 3]) == 15
    assert seconds(pair, two_nodes(inside=NEAR), ranks=[3, 2]) == 5 / 2 + 1


def test_two_levels_against_a_flat_ring_by_hand():
    """Four elements of a byte, two nodes of two, nothing inside. Bytes alone: a flat ring crosses once a step and node,
    6 steps of one byte. Two levels cross twice, two bytes through one NIC, or one through each of two. With α = 10 the
    ring pays it in every other step: a piece that has crossed goes on inside, for nothing, before it crosses again."""
    flat = messages("all_reduce", "ring", 4, 1, 4)
    levels = messages("all_reduce", "two_level", 4, 1, 4, per_node=2)
    assert [seconds(flat, two_nodes(nic=nic, between=BARE)) for nic in ("node", "rank")] == [6, 6]
    assert [seconds(levels, two_nodes(nic=nic, between=BARE)) for nic in ("node", "rank")] == [4, 2]
    assert [seconds(flat, two_nodes(nic=nic)) for nic in ("node", "rank")] == [34, 34]
    assert [seconds(levels, two_nodes(nic=nic)) for nic in ("node", "rank")] == [3 + 20, 2 + 20]


def test_inside_links_add_to_two_levels():
    """Two bytes each way inside before and after: 2/2 + 1 seconds each."""
    levels = messages("all_reduce", "two_level", 4, 1, 4, per_node=2)
    assert seconds(levels, two_nodes(nic="rank", inside=NEAR)) == 22 + 2 * 2


@pytest.mark.parametrize("per_node", [2, 4, 8])
def test_large_tensors_gain_as_many_times_as_a_node_has_nics(per_node):
    """Each NIC then carries a per_node-th of 2 (m − 1)/m n, where the flat ring sends 2 (p − 1)/p n over each link."""
    n, p = 2**20, 2 * per_node
    levels = messages("all_reduce", "two_level", n, 1, p, per_node=per_node)
    flat = messages("all_reduce", "ring", n, 1, p)
    ib = find_link("ethernet-25")
    own = seconds(flat, two_nodes(per_node, "rank", ib)) / seconds(levels, two_nodes(per_node, "rank", ib))
    shared = seconds(flat, two_nodes(per_node, "node", ib)) / seconds(levels, two_nodes(per_node, "node", ib))
    assert shared == pytest.approx(2 * (p - 1) / p)
    assert own == pytest.approx(per_node * 2 * (p - 1) / p)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: seconds([[send(0, 4, 1)]], APART), "a message from 0 to 4, and only 4 ranks: take a topology with more"),
    (lambda: seconds([[send(2, 0, 1)]], APART, ranks=[0, 1]), "a message from 2 to 0, and only 2 ranks"),
    (lambda: seconds([[send(0, 1, 1)]], APART, ranks=[0, 1, 4]), "no rank 4 on 4 nodes of 1: the last is 3"),
    (lambda: seconds([[send(0, 1, 1)]], APART, ranks=[2, 2]), r"ranks = \[2, 2\] names a rank twice"),
])
def test_ranks_that_are_nowhere_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
