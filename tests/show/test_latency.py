"""Seconds over bytes: a line for what is predicted, marks for what was measured, in the same colour."""

import pytest

from shardlab.show import latency

CURVES = {"ring": [(1024, 1e-5), (2**20, 2e-5)], "tree": [(1024, 5e-6), (2**20, 4e-5)]}


def test_lines_marks_and_crossovers():
    picture = latency(CURVES, {"ring": [(4096, 2e-5), (2048, 1e-5)], "measured only": [(1024, 1e-4)]}, "title",
                      {"they meet": 2.0e5})
    axes = picture.axes[0]
    ring, of_ring, tree, alone, mark = axes.lines
    assert list(ring.get_xdata()) == [1024, 2**20] and list(ring.get_ydata()) == [1e-5, 2e-5]
    assert list(of_ring.get_xdata()) == [2048, 4096], "in order of size"
    assert ring.get_color() == of_ring.get_color() and len({ring.get_color(), tree.get_color(), alone.get_color()}) == 3
    assert ring.get_linestyle() != tree.get_linestyle() and of_ring.get_linestyle() == "None"
    assert list(mark.get_xdata()) == [2.0e5, 2.0e5] and axes.texts[0].get_text() == "they meet"
    assert axes.get_xscale() == axes.get_yscale() == "log" and axes.get_title("left") == "title"
    assert [text.get_text() for text in picture.legends[0].get_texts()] == ["ring", "tree", "measured only"]
    picture._repr_svg_()
    assert "32 KiB" in [label.get_text() for label in axes.get_xticklabels()]
    assert "10 µs" in [label.get_text() for label in axes.get_yticklabels()]


@pytest.mark.parametrize("args, said", [
    (({},), "nothing to draw"),
    (({"ring": []}, {"ring": []}), "nothing to draw"),
    (({"ring": [(0, 1e-5)]},), "ring: 0 bytes in 1e-05 s"),
    (({"ring": [(1, 0.0)]},), "ring: 1 bytes in 0 s"),
    ((CURVES, None, "", {"x": 0}), "mark 'x'"),
    (({str(i): [(1, 1.0)] for i in range(7)},), "7 names"),
])
def test_what_has_no_place_is_refused(args, said):
    with pytest.raises(ValueError, match=said):
        latency(*args)
