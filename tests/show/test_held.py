"""Sizes over cards and bars of parts: as many outlines, as long bars, as the numbers say."""

import pytest
from matplotlib.patches import Rectangle

from shardlab.show import over_cards, stacked
from shardlab.show.palette import HELD
from shardlab.specs import find_card

CARD = find_card("h100")


def rectangles(picture):
    return [patch for patch in picture.axes[0].patches if isinstance(patch, Rectangle)]


def test_a_card_is_filled_as_far_as_the_bytes_reach():
    boxes = rectangles(over_cards({"nine": 8 * CARD.memory + CARD.memory // 4, "one": CARD.memory}, CARD))
    outlines = [box for box in boxes if box.get_facecolor()[3] == 0]
    widths = [box.get_width() / outlines[0].get_width() for box in boxes if box.get_facecolor()[3]]
    assert len(outlines) == 10
    assert widths == pytest.approx([1] * 8 + [0.25, 1])
    assert outlines[8].get_x() == 0, "the ninth begins a line"
    with pytest.raises(ValueError, match="none: 0 bytes can't be laid over cards"):
        over_cards({"none": 0}, CARD)


def test_bars_are_as_long_as_their_parts():
    picture = stacked({"a": {"weights": 2, "moments": 8}, "b": {"weights": 3}}, "B", ("a card", 12))
    bars = rectangles(picture)
    assert [(bar.get_x(), bar.get_width()) for bar in bars] == [(0, 2), (2, 8), (0, 3)]
    assert {text.get_text() for text in picture.axes[0].texts} >= {"a", "b", "10 B", "3 B", "a card"}
    assert [text.get_text() for text in picture.legends[0].get_texts()] == ["weights", "moments"]
    with pytest.raises(ValueError, match="no bars"):
        stacked({}, "B")


def test_kinds_are_told_apart():
    assert len(set(HELD.values())) == len(HELD)
