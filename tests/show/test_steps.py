"""The steps of a collective as its ledgers tell them: what is added, what is copied, what is refused."""

import re

import pytest
import torch
from matplotlib.patches import FancyArrowPatch

from shardlab import comm, cost, show
from shardlab.cost.messages import ALGORITHMS, messages
from shardlab.show.contributions import follow
from shardlab.specs import LinkSpec, Topology

INSTANT = LinkSpec(name="instant", per_direction=1e15)


def run(group, verb, algorithm, shape, topology=None, **how):
    x = torch.ones(shape)
    with comm.use(algorithm, topology=topology), comm.record() as ledger:
        getattr(comm, verb)(x, **how)
    return ledger


def record(ranks, *args, **how):
    return comm.Ledger.merge(ranks.run(run, *args, **how)).to_dicts()


def told(algorithm, numel, p, op="all_reduce", **how):
    """The ledgers of ranks that send what `cost.messages` says: for worlds that no pool is kept for."""
    rounds = messages(op, algorithm, numel, 4, p, **how)
    return [dict(op=op, algorithm=algorithm, ranks=tuple(range(p)), rank=r, shape=(numel,), payload=4 * numel,
                 axis="world", messages=[m._asdict() for sent in rounds for m in sent if m.src == r])
            for r in range(p)]


def counts(step):
    return [[len(whose) for whose in pieces] for pieces in step.held]


def topology_of(algorithm, p):
    return Topology(nodes=2, per_node=p // 2, between=INSTANT) if algorithm == "two_level" and p % 2 == 0 else None


@pytest.mark.parametrize("numel", [2, 4, 11])  # shorter than the world, and of unequal pieces
@pytest.mark.parametrize("algorithm", ALGORITHMS["all_reduce"])
@pytest.mark.parametrize("p", [3, 4])
def test_every_algorithm_ends_with_all_data_everywhere(pool, p, algorithm, numel):
    steps = follow(record(pool(p), "all_reduce", algorithm, (numel,), topology_of(algorithm, p)))
    assert len(steps) > 1
    assert all(whose == set(range(p)) for pieces in steps[-1].held for whose in pieces)
    assert any(len(whose) < p for pieces in steps[-2].held for whose in pieces), "the last step brings something"


@pytest.mark.parametrize("p", [2, 5])
@pytest.mark.parametrize("algorithm", ALGORITHMS["all_reduce"])
def test_so_it_does_in_worlds_of_two_and_five(p, algorithm):
    how = {"per_node": p} if algorithm == "two_level" else {}
    for numel in (1, p, 4 * p + 3):
        steps = follow(told(algorithm, numel, p, **how))
        assert all(whose == set(range(p)) for pieces in steps[-1].held for whose in pieces)


def test_a_ring_adds_one_rank_a_step_and_then_copies(pool):
    p = 4
    steps = follow(record(pool(p), "all_reduce", "ring", (10,)))
    assert len(steps) == 2 * (p - 1)
    for s, step in enumerate(steps[: p - 1]):
        for r in range(p):
            piece = (r - 2 - s) % p  # what has just come, from the left
            assert step.held[r][piece] == {(r - i) % p for i in range(s + 2)}
    for s, step in enumerate(steps[p - 1 :]):
        for r in range(p):
            whole = {i for i, whose in enumerate(step.held[r]) if len(whose) == p}
            assert whole == {(r - i) % p for i in range(s + 2)}


@pytest.mark.parametrize("algorithm, expected", [
    ("doubling", [[1, 2, 1], [1, 3, 3], [3, 3, 3]]),  # 0 folded into 1, 1 with 2, and back to 0
    ("tree", [[2, 1, 1], [3, 1, 1], [3, 1, 3], [3, 3, 3]]),
    ("naive", [[3, 1, 1], [3, 3, 3]]),
])
def test_what_three_ranks_hold_after_each_step(pool, algorithm, expected):
    steps = follow(record(pool(3), "all_reduce", algorithm, (7,)))
    assert [[pieces[0] for pieces in counts(step)] for step in steps] == expected


def test_two_levels_add_up_inside_before_anything_crosses(pool):
    steps = follow(record(pool(4), "all_reduce", "two_level", (8,), topology_of("two_level", 4)))
    assert [any(m.src // 2 != m.dst // 2 for m in step.sent) for step in steps] == [False, True, True, False]
    assert all({2 * (r // 2), 2 * (r // 2) + 1} in pieces for r, pieces in enumerate(steps[0].held))


def test_a_reduction_ends_at_its_root_and_a_broadcast_starts_there(pool):
    down = follow(record(pool(4), "broadcast", "tree", (5,), src=2))
    assert [sorted(r for r in range(4) if step.held[r][0]) for step in down] == [[0, 2], [0, 1, 2, 3]]
    assert all(pieces == [{2}] for pieces in down[-1].held)
    up = follow(record(pool(4), "reduce", "tree", (5,), dst=1))
    assert [len(step.held[1][0]) for step in up] == [2, 4]
    assert all(len(up[-1].held[r][0]) < 4 for r in (0, 2, 3))


def test_a_picture_has_a_panel_a_step_an_arrow_a_message_and_a_number_a_piece(pool):
    entries = record(pool(4), "all_reduce", "ring", (10,))
    picture = show.steps(entries, "a ring")
    texts = [[text.get_text() for text in axes.texts] for axes in picture.axes]
    assert [panel[-1] for panel in texts] == [f"step {i}" for i in range(1, 7)]
    for panel, axes, step in zip(texts, picture.axes, follow(entries), strict=True):
        numbers = [f"{n}" for pieces in counts(step) for n in pieces]
        assert sorted(panel[:-1]) == sorted([*numbers, "rank 0", "1", "2", "3"])
        arrows = [patch for patch in axes.patches if isinstance(patch, FancyArrowPatch)]
        assert len(arrows) == 5  # of four messages one goes round: out on the right, in on the left
    assert "<svg" in picture._repr_svg_()


def test_what_cannot_be_followed_is_refused_by_name(pool):
    ring = record(pool(3), "all_reduce", "ring", (9,))
    changed = [ring[0] | {"messages": ring[0]["messages"][::-1]}, *ring[1:]]
    nowhere = [e | {"messages": [m | {"offset": -1} for m in e["messages"]]} for e in ring]
    for entries, said in [
        ([], "empty ledger"),
        (ring[:2], "an entry of each of its ranks [0, 1, 2]; these are 2 entries"),
        (ring + ring, "these are 6 entries of ranks [0, 0, 1, 1, 2, 2]"),
        (record(pool(3), "all_reduce", "backend", (9,)), "the backend's own"),
        (record(pool(3), "all_reduce", "ring", (0,)), "no elements"),
        (record(pool(3), "reduce_scatter", "ring", (9,)), "all_reduce, reduce, broadcast: of reduce_scatter"),
        (changed, "not those of all_reduce by 'ring' over ranks [0, 1, 2]"),
        (nowhere, "offset -1"),
    ]:
        with pytest.raises(ValueError, match=re.escape(said)):
            show.steps(entries)


def test_the_wire_is_what_cost_says_rank_by_rank(pool):
    for algorithm in ALGORITHMS["all_reduce"]:
        entries = record(pool(3), "all_reduce", algorithm, (10,))
        what = ("all_reduce", algorithm, 10, 4, 3)
        how = {"per_node": 3} if algorithm == "two_level" else {}
        predicted = {r: (cost.message_count(*what, r, **how), cost.wire(*what, r, **how)) for r in range(3)}
        comparison = show.wire(predicted, entries)
        assert comparison and len(comparison.rows) == 3 and "differs" not in str(comparison)
        assert comparison._repr_html_().count("<tr>") == 4
        for wrong in ({**predicted, 2: (predicted[2][0], predicted[2][1] + 1)}, {0: predicted[0], 1: predicted[1]},
                      {**predicted, 3: (1, 4)}):
            assert not show.wire(wrong, entries) and str(show.wire(wrong, entries)).count("differs") == 1
    with pytest.raises(ValueError, match="derived, not counted"):
        show.wire({0: (0, 0)}, record(pool(3), "all_reduce", "backend", (10,)))


def test_a_timeline_has_a_thin_bar_for_each_message(pool):
    entries = record(pool(3), "all_reduce", "ring", (9,))
    bars = show.timeline(entries).axes[0].patches
    assert len(bars) == 3 + 3 * 4
    thin = [bar for bar in bars if bar.get_height() < 0.3]
    assert len(thin) == 12 and all(bar.get_width() > 0 for bar in thin)
