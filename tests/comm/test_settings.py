"""`comm.use`: blocks add up, end as they began, and say which way the verbs go."""

import sys

import pytest
import torch
import torch.distributed as dist

from shardlab import comm
from shardlab.comm.algorithms import TABLE, names
from shardlab.comm.settings import Settings, now
from shardlab.launch import launch, ranks
from shardlab.specs import LinkSpec, Topology

linux = pytest.mark.skipif(sys.platform != "linux", reason="memory that ranks share wants Linux")
LINK = LinkSpec(name="at once", per_direction=1e15)


def nodes(count, per_node, **more):
    return Topology(nodes=count, per_node=per_node, between=LINK, **more)


def went(verb="all_reduce", group=None):
    """(algorithm, transport) of one collective here and now, and the links that its messages took."""
    root = {"src": 0} if verb == "broadcast" else {}
    with comm.record() as ledger:
        getattr(comm, verb)(torch.ones(4), group=group, **root)
    entry, = ledger.entries
    return entry.algorithm, entry.transport, sorted({m.link for m in entry.messages})


def nested(group):
    out = [went()]
    with comm.use("doubling"):
        out.append(went())
        with comm.use(transport="shm"):
            out.append(went())
            with comm.use():  # nothing named: nothing changes
                out.append(went())
            with comm.use("backend"):
                out.append(went())
                with comm.use(transport="backend"):
                    out.append(went())
                with comm.use(topology=nodes(1, 2)):
                    out.append(went())
                with comm.use(topology=nodes(2, 1)):
                    out.append(went())
            out.append(went())
        out.append(went())
    out.append(went())
    return out


@linux
def test_blocks_add_up_and_end_as_they_began(pool):
    gloo, doubling, both, shm = ("", "gloo", []), ("doubling", "gloo", [""]), ("doubling", "shm", [""]), \
        ("shared", "shm", [])
    across = ("ring", "gloo", ["at once"])  # a rank a node: no two share memory
    assert pool(2).run(nested) == [[gloo, doubling, both, both, shm, gloo, shm, across, both, doubling, gloo]] * 2


def test_settings_outside_of_ranks_are_only_kept():
    before = now()
    assert before == Settings()
    with pytest.raises(KeyError), comm.use("tree", topology=nodes(3, 1), debug=True):
        assert now() == Settings("tree", topology=nodes(3, 1), debug=True)
        with comm.use(debug=False):
            assert now() == Settings("tree", topology=nodes(3, 1))
        raise KeyError  # ends the block, and its settings
    assert now() is before


@pytest.mark.parametrize("name", ["backend", *names()])
def test_every_algorithm_has_a_name_to_ask_for(name):
    with comm.use(name):
        assert now().algorithm == name


@pytest.mark.parametrize(("given", "error", "words"), [
    ({"algorithm": "Ring"}, ValueError, "no algorithm 'Ring'; use one of backend, ring, doubling, halving, tree"),
    ({"algorithm": ""}, ValueError, "no algorithm ''"),
    ({"algorithm": "shared"}, ValueError, "no algorithm 'shared'"),  # that is transport="shm"
    ({"transport": "nvlink"}, ValueError, "no transport 'nvlink'; use 'shm', or 'backend'"),
    ({"transport": "shm"}, ValueError, r"no rank that launch has started.*comm.use\(transport='backend'\)"),
    ({"topology": 4}, TypeError, "topology must be a specs.Topology, not 4"),
    ({"topology": LINK}, TypeError, "topology must be a specs.Topology"),
    ({"algoritm": "ring"}, TypeError, "algoritm"),
])
def test_what_there_is_not_is_refused(given, error, words):
    before = now()
    with pytest.raises(error, match=words), comm.use(**given):
        pass
    assert now() is before


def of_another_size(group):
    out = []
    if group.rank() == 0:
        with comm.use(topology=nodes(2, 2)):
            for verb in (lambda: comm.all_reduce(torch.ones(1)), comm.barrier, lambda: comm.send(torch.ones(1), 1)):
                with pytest.raises(ValueError, match="a topology of 2 × 2 = 4 ranks for 2: make them equal"):
                    verb()
                out.append(True)
    return out


def test_a_topology_of_another_number_of_ranks_is_refused_before_anyone_waits(pool):
    assert pool(2).run(of_another_size) == [[True] * 3, []]


def test_of_a_name_that_a_verb_has_not_got_it_takes_its_own(pool):
    def verbs(group):
        out = {}
        for name in names():
            with comm.use(name):
                out[name] = [went(verb)[0] for verb in ("all_reduce", "all_gather", "reduce_scatter", "broadcast")]
        return out

    for out in pool(2).run(verbs):
        for name, took in out.items():
            assert took == [name if name in TABLE["all_reduce"] else "ring", "ring", "ring", "tree"]


def placed(group, topology=None):
    with comm.use(topology=topology):
        out = [went(), went("broadcast")]
        with comm.use("two_level"):
            out.append(went())
        return out


def test_a_topology_given_to_launch_is_that_of_use():
    two = nodes(2, 2, inside=LinkSpec(name="inside", per_direction=1e15))
    ring = ("ring", "gloo", ["at once"]), ("ring", "gloo", ["inside"])  # ranks 1 and 3 send to the other node
    tree = [("tree", "gloo", links) for links in (["at once", "inside"], [], ["inside"], [])]
    both = ("two_level", "gloo", ["at once", "inside"])
    expected = [[ring[(rank + 1) % 2], tree[rank], both] for rank in range(4)]
    assert launch(placed, 4, topology=two) == expected
    with ranks(4) as some:
        assert some.run(placed, two) == expected
    with ranks(4, topology=nodes(4, 1)) as some:
        assert some.run(placed, two) == expected  # the innermost holds
        assert some.run(placed)[0] == [("ring", "gloo", ["at once"]), ("tree", "gloo", ["at once"]),
                                       ("two_level", "gloo", ["at once"])]
        assert some.run(placed, nodes(1, 4))[0] == [("ring", "gloo", [""]), ("tree", "gloo", [""]),
                                                    ("two_level", "gloo", [""])]


@pytest.mark.parametrize(("topology", "error", "words"), [
    (nodes(2, 2), ValueError, "a topology of 2 × 2 = 4 ranks for 3"), ("two nodes", TypeError, "specs.Topology")])
def test_launch_refuses_a_topology_before_it_starts_anything(topology, error, words):
    with pytest.raises(error, match=words):
        launch(lambda group: 0, 3, topology=topology)


@linux
def test_ranks_of_a_node_share_memory_and_nodes_have_gloo_between_them(pool):
    def where(group):
        with comm.use(transport="shm", topology=nodes(2, 2)):
            pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
            pair = pairs[group.rank() // 2]
            out = [went(), went(group=pair)]
            with comm.record() as ledger:
                for dst in (1, 2):
                    if group.rank() in (0, dst):
                        verb = comm.send if group.rank() == 0 else comm.recv
                        verb(torch.ones(3), dst if group.rank() == 0 else 0)
            comm.barrier()
            dist.destroy_process_group(pair)
            return out, [e.transport for e in ledger.entries]

    links = [[""], ["at once"], [""], ["at once"]]
    sent = [["shm", "gloo"], ["shm"], ["gloo"], []]
    assert pool(4).run(where) == [([("ring", "gloo+shm", links[r]), ("shared", "shm", [])], sent[r]) for r in range(4)]


def unequal(group):
    some, out = dist.new_group([0, 1, 2]), ""
    if group.rank() < 3:
        with comm.use("two_level", topology=nodes(2, 2)), pytest.raises(ValueError) as raised:
            comm.all_reduce(torch.ones(4), group=some)
        out = str(raised.value)
        dist.destroy_process_group(some)
    return out


def test_two_levels_need_equally_many_ranks_on_each_node(pool):
    for text in pool(4).run(unequal)[:3]:
        assert "equally many ranks of the group on each node, not [2, 1]: use another algorithm" in text
