"""The picture of waits: a point of a line says how many waited no longer."""

import pytest

from shardlab.show import waits

RUNS = {"one": {"TTFT": [3.0, 1.0, 2.0, 2.0], "TPOT": [0.1], "ITL": [0.2]}, "two": {"TTFT": [0.5, 0.25]}}


def test_a_line_is_the_share_that_waited_no_longer():
    above, below = waits(RUNS, {"TTFT": 1.5}, "title").axes
    one, two, limit = above.lines
    assert list(zip(one.get_xdata(), one.get_ydata(), strict=True)) == [(1, 0), (1, 0.25), (2, 0.5), (2, 0.75), (3, 1)]
    assert list(zip(two.get_xdata(), two.get_ydata(), strict=True)) == [(0.25, 0), (0.25, 0.5), (0.5, 1)]
    assert one.get_drawstyle() == "steps-post" and above.get_xscale() == "log"
    assert list(limit.get_xdata()) == [1.5, 1.5] and above.texts[0].get_text() == "limit 1.5 s"
    assert list(below.lines[0].get_xdata()) == [0.1, 0.1] and len(below.lines) == 1 and not below.texts
    assert (above.get_xlabel(), below.get_xlabel(), above.get_title("left")) == ("TTFT", "TPOT", "title")


def test_runs_are_told_apart_and_keep_their_colour_in_all_panels():
    figure = waits({"one": {"TTFT": [1.0]}, "two": {"TTFT": [2.0], "TPOT": [0.1]}})
    (one, two), (also_two,) = (axes.lines for axes in figure.axes)
    assert one.get_color() != two.get_color() == also_two.get_color()
    assert one.get_linestyle() != two.get_linestyle() == also_two.get_linestyle()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["one", "two"]
    assert "<svg" in figure._repr_svg_()


def test_one_run_one_name_and_no_legend():
    figure = waits({"one": {"ITL": [1.0], "TTFT": []}}, names=("TTFT", "ITL"))
    assert [axes.get_xlabel() for axes in figure.axes] == ["ITL"] and not figure.legends


def test_a_long_run_is_thinned_out_and_keeps_its_ends():
    line = waits({"one": {"TTFT": [i + 1 for i in range(100_000)]}}).axes[0].lines[0]
    x, y = line.get_xdata(), line.get_ydata()
    assert len(x) < 500 and (x[0], x[-1], y[0], y[-1]) == (1, 100_000, 0, 1)
    assert all(share == pytest.approx(t / 100_000) for t, share in list(zip(x, y, strict=True))[1:])


def test_no_wait_at_all_counts_though_a_log_axis_has_no_place_for_it():
    line = waits({"one": {"TTFT": [0.0, 0.0, 1.0, 2.0]}}).axes[0].lines[0]
    assert list(zip(line.get_xdata(), line.get_ydata(), strict=True)) == [(1, 0.5), (1, 0.75), (2, 1)]
    assert "<svg" in waits({"one": {"TTFT": [0.0]}})._repr_svg_()


def test_nothing_and_too_much_are_refused():
    for runs, said in (({}, "nothing to draw"), ({"a": {"TTFT": []}}, "nothing to draw"),
                       ({str(i): {"TTFT": [1.0]} for i in range(7)}, "7 runs can't be told apart")):
        with pytest.raises(ValueError, match=said):
            waits(runs)
