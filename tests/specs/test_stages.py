"""Which layers are in which stage: each in one, the heaviest stage as light as can be."""

import random
from itertools import combinations_with_replacement, pairwise

import pytest

from shardlab.schedule import interleaved, placement
from shardlab.specs.stages import split


def test_every_layer_is_in_one_stage_and_stages_differ_by_one_at_most():
    """FAULTS P1: no count of layers and stages loses any."""
    for layers in range(21):
        for stages in range(1, 9):
            parts = split(layers, stages)
            assert len(parts) == stages
            assert [layer for part in parts for layer in part] == list(range(layers))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_stages_of_a_rank_lie_apart_and_hold_every_layer_once():
    """FAULTS P2: with several stages a rank too, the layers' numbers are those of the whole model."""
    for layers in range(1, 21):
        for ranks in range(1, 5):
            for chunks in (1, 2, 3):
                parts = split(layers, ranks * chunks)
                owned = [layer for stages in placement(interleaved(ranks, ranks, chunks)) for stage in stages
                         for layer in parts[stage]]
                assert sorted(owned) == list(range(layers))


def weights_of(bounds, weights):
    """What each stage weighs, the ends' weights too."""
    first, *each, last = weights
    parts = [sum(each[start:stop]) for start, stop in pairwise(bounds)]
    parts[0] += first
    parts[-1] += last
    return parts


def test_it_is_the_best_of_all():
    """Against every way to cut: the heaviest stage, then how even the others are."""
    chance = random.Random(0)
    for _ in range(150):
        layers, stages = chance.randint(1, 7), chance.randint(1, 4)
        ends = chance.choice([True, False])
        weights = [chance.choice((0, 1, 1, 2, 3, 0.5, 7)) for _ in range(layers + 2 * ends)]
        whole = weights if ends else [0, *weights, 0]
        ways = [weights_of((0, *cuts, layers), whole)
                for cuts in combinations_with_replacement(range(layers + 1), stages - 1)]
        best = min((max(parts), sum(part**2 for part in parts)) for parts in ways)
        parts = split(layers, stages, weights)
        assert [layer for part in parts for layer in part] == list(range(layers))
        found = weights_of([0, *(part.stop for part in parts)], whole)
        assert (max(found), sum(part**2 for part in found)) == pytest.approx(best)


@pytest.mark.parametrize(("layers", "stages", "weights", "sizes"), [
    (4, 2, [3, 1, 1, 1], [1, 3]),
    (4, 2, [1, 1, 1, 3], [3, 1]),
    (7, 3, [0, 1, 1, 1, 1, 1, 1, 1, 2], [3, 3, 1]),  # a head that weighs two layers
    (6, 2, [2, 1, 1, 1, 1, 1, 1, 0], [2, 4]),
    (4, 3, [9, 1, 1, 1, 1, 0], [0, 2, 2]),  # the embedding alone is the heaviest
    (2, 2, [0, 1, 1, 0], [1, 1]),
    (0, 2, [5, 5], [0, 0]),
    (5, 1, [1, 2, 3, 4, 5, 6, 7], [5]),
    (126, 16, None, [8] * 14 + [7] * 2),
])
def test_weights_move_layers(layers, stages, weights, sizes):
    found = [len(part) for part in split(layers, stages, weights)]
    assert found == sizes or (weights is None and sorted(found) == sorted(sizes))


def test_rounding_of_weights_cuts_no_worse():
    """Thirds add up to no whole number: three alike stages are still three alike ones."""
    assert [len(part) for part in split(9, 3, [1 / 3] * 9)] == [3, 3, 3]
    assert [len(part) for part in split(12, 4, [0.1] * 12)] == [3] * 4
    for weight in (1e200, 1e-200):
        assert [len(part) for part in split(6, 3, [weight] * 6)] == [2] * 3
    assert [len(part) for part in split(6, 3, [1e-9] * 6)] == [len(part) for part in split(6, 3, [1e9] * 6)] == [2] * 3


@pytest.mark.parametrize(("layers", "stages", "weights", "message"), [
    (4, 0, None, "4 layers in a pipeline of 0 stages: give at least 1"),
    (-1, 2, None, "-1 layers in a pipeline of 2 stages: .* layers from 0"),
    (4, 2, [1, 1, 1], "weights must be 4 numbers from 0, one a layer, or 6 with those of embedding and head, not"),
    (4, 2, [1] * 5, "weights must be 4 numbers .* or 6 "),
    (4, 2, [], "weights must be 4 numbers"),
    (4, 2, [1, 1, 1, -1], "weights must be 4 numbers from 0"),
    (4, 2, [1, 1, 1, float("nan")], "weights must be 4 numbers from 0"),
    (4, 2, [1, 1, 1, float("inf")], "weights must be 4 numbers from 0"),
])
def test_what_makes_no_sense_is_refused_with_its_numbers(layers, stages, weights, message):
    with pytest.raises(ValueError, match=message):
        split(layers, stages, weights)
