"""Pipelines in time: what is drawn is what the schedule or the ledger says, predicted and measured alike."""

from dataclasses import asdict

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from shardlab import comm, show
from shardlab.cost import Times, timeline
from shardlab.schedule import clock, dualpipe_v, gpipe, interleaved, one_f_one_b, zero_bubble
from shardlab.show.palette import WORK
from shardlab.show.pipeline import PALEST, boxes, colour_of


def works(spans, begin=0.0, seconds=1.0):
    """What a ledger would have recorded of it."""
    return [asdict(comm.Work(*span.action[:3], rank, begin + seconds * span.start, begin + seconds * span.end))
            for rank, mine in enumerate(spans) for span in mine]


def drawn(picture):
    """{colour: the boxes' (left, top, width)}, without the legend."""
    found = {}
    for patch in picture.axes[0].patches:
        assert isinstance(patch, Rectangle)
        found.setdefault(to_hex(patch.get_facecolor()).upper(), []).append(
            (patch.get_x(), patch.get_y(), patch.get_width()))
    return found


def test_each_pass_is_a_box_in_the_colour_of_its_kind():
    found = drawn(show.pipeline({"ZB-H1": timeline(zero_bubble(3, 5))}))
    counts = {kind: len(found[colour]) for kind, colour in WORK.items()}
    assert counts == {"forward": 15, "backward": 15, "weight gradient": 15, "idle": 3}
    assert {width for *_, width in found[WORK["backward"]]} == {1}, "a half of backward is as long as forward"
    whole = drawn(show.pipeline({"1F1B": timeline(one_f_one_b(3, 5), Times(1, 2, 1.5))}))
    assert {width for *_, width in whole[WORK["backward"]]} == {3.5}
    assert WORK["weight gradient"] not in whole


def test_what_was_measured_is_drawn_as_what_was_predicted():
    plan = timeline(gpipe(3, 4))
    seen = works(plan.spans, begin=1e5, seconds=1.0)
    assert boxes(seen) == boxes(plan) == boxes(clock(gpipe(3, 4)))
    picture = show.pipeline({"predicted": plan, "measured": seen[::-1]}, "s")
    for boxes_of in drawn(picture).values():
        half = len(boxes_of) // 2
        assert [(x, width) for x, _, width in boxes_of[:half]] == [(x, width) for x, _, width in boxes_of[half:]]
    assert {"predicted", "measured", "P2"} <= {text.get_text() for text in picture.axes[0].texts}
    assert picture.axes[0].get_xlim() == (0, plan.total)


def test_grey_reaches_to_the_end_of_its_own_case():
    long, short = timeline(gpipe(2, 4)), timeline(gpipe(2, 2))
    assert [width for *_, width in drawn(show.pipeline({"a": long, "b": short}))[WORK["idle"]]] == [
        long.total, long.total, short.total, short.total]


def test_the_stages_of_a_rank_have_shades_of_their_own():
    mine = [box for box in boxes(timeline(interleaved(2, 2, 3))) if box.rank == 1 and box.kind == "F"]
    assert [box.shade for box in mine] == pytest.approx([0, 0, PALEST / 2, PALEST / 2, PALEST, PALEST])
    tints = {colour_of(kind, shade) for kind in "FBW" for shade in (0, PALEST / 2, PALEST)}
    assert len(tints | {WORK["idle"]}) == 10


def test_a_pair_shares_its_row():
    told = boxes(timeline(dualpipe_v(2, 4)))
    paired = [box for box in told if box.half]
    assert len(paired) == 2 * sum(action.paired for order in dualpipe_v(2, 4) for action in order)
    assert {(box.kind, box.half) for box in paired} == {("F", 1), ("B", 2)}
    assert not any(box.half for box in boxes(clock(gpipe(2, 4), lambda action: 0.0))), "no time, no pair"


def test_numbers_stand_where_there_is_room():
    def numbers(microbatches):
        picture = show.pipeline({"": timeline(gpipe(2, microbatches))})
        return sum(text.get_text().isdigit() for text in picture.axes[0].texts)

    assert numbers(4) == 16
    assert numbers(40) < 160


def test_nothing_to_draw_is_refused():
    at_once = [{"kind": "F", "stage": 0, "microbatch": 0, "rank": 0, "start": 1.0, "end": 1.0}]
    for cases in ({}, {"measured": []}, {"at once": at_once}):
        with pytest.raises(ValueError, match="nothing to draw"):
            show.pipeline(cases)
