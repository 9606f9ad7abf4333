"""The picture of a run's log: its numbers are the log's."""

import math

import pytest

from shardlab.show import training


def log(n, **more):
    return [{"step": 10 + i, "loss": 5 / (i + 1), "tokens_per_second": 100.0 + i} | more for i in range(n)]


def test_lines_are_the_logs_and_a_step_that_is_not_finite_is_a_gap():
    broken = log(4)
    broken[2]["loss"] = None
    figure = training({"one": log(3), "two": broken}, title="Two runs", loss="nats a byte")
    above, below = figure.axes
    first, second = above.get_lines()
    assert list(first.get_xdata()) == [10, 11, 12] and list(first.get_ydata()) == [5, 2.5, 5 / 3]
    assert math.isnan(second.get_ydata()[2]) and second.get_ydata()[3] == 1.25
    assert [list(line.get_ydata()) for line in below.get_lines()] == [[100, 101, 102], [100, 101, 102, 103]]
    assert [text.get_text() for text in above.get_legend().get_texts()] == ["one", "two"]
    assert above.get_ylabel() == "nats a byte" and above.get_title("left") == "Two runs"
    assert first.get_color() != second.get_color() and first.get_linestyle() != second.get_linestyle()
    assert "<svg" in figure._repr_svg_()


def test_one_run_needs_no_legend_and_one_step_is_a_mark():
    above, _ = training({"one": log(1)}).axes
    assert above.get_legend() is None and above.get_lines()[0].get_marker() == "o"


def test_nothing_and_too_much_are_refused():
    for runs, said in (({}, "nothing to draw"), ({"a": []}, "nothing to draw"),
                       ({str(i): log(1) for i in range(7)}, "7 runs can't be told apart")):
        with pytest.raises(ValueError, match=said):
            training(runs)
