"""Pictures come from specs and ledgers, comparisons say what differs, figures carry their machine."""

import itertools
import math
import re

import pytest
from matplotlib.colors import to_rgba

from shardlab import show
from shardlab.cost import traffic
from shardlab.show.palette import AXES, INK, LINES, PALE, WORK, ladder, on
from shardlab.specs import Layout, find_model

LLAMA = find_model("llama-3.1-70b")


def entries(bill, rank=0, **changes):
    """The ledger of a rank that did exactly what the bill says."""
    calls = [c for c in bill.collectives for _ in range(c.count)]
    return [dict(op=c.op, axis=c.axis, phase=c.phase, payload=c.payload, rank=rank, start=i, end=i + 0.5) | changes
            for i, c in enumerate(calls)]


def test_a_comparison_is_true_where_every_row_agrees():
    bill = traffic(LLAMA, Layout(tp=8), 1, 1, "bf16")
    good = show.compare(bill.to_dict()["collectives"], entries(bill))
    assert good and [row[0:2] for row in good.rows] == [("all_reduce", "forward"), ("all_reduce", "backward")]
    assert "differs" not in str(good) and good._repr_html_().count("<tr>") == 3


def test_one_call_too_few_one_byte_too_many_or_an_op_nobody_predicted_differs():
    bill = traffic(LLAMA, Layout(tp=8), 1, 1, "bf16")
    rows, counted = bill.to_dict()["collectives"], entries(bill)
    fewer, more = counted[:-1], [counted[0] | {"payload": counted[0]["payload"] + 1}, *counted[1:]]
    strange = [*counted, counted[0] | {"op": "send"}]
    for ledger in (fewer, more, strange):
        comparison = show.compare(rows, ledger)
        assert not comparison and "differs" in str(comparison)


def test_a_ledger_of_several_ranks_is_not_held_against_the_bill_of_one():
    bill = traffic(LLAMA, Layout(tp=8), 1, 1, "bf16")
    with pytest.raises(ValueError, match=r"ranks \[0, 1\]"):
        show.compare(bill.to_dict()["collectives"], entries(bill) + entries(bill, rank=1))


def test_a_timeline_has_a_bar_for_each_entry_and_a_row_for_each_rank():
    bill = traffic(LLAMA, Layout(tp=8), 1, 1, "bf16")
    picture = show.timeline(entries(bill) + entries(bill, rank=3, phase="backward"), "title")
    axes = picture.axes[0]
    assert len(axes.patches) == 2 * bill.count()
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 3"]
    assert {text.get_text() for text in picture.legends[0].get_texts()} == {"tp forward", "tp backward"}
    assert "<svg" in picture._repr_svg_()
    with pytest.raises(ValueError, match="empty ledger"):
        show.timeline([])


def test_collectives_under_way_at_a_time_lie_below_one_another():
    def entry(start, end, rank=0):
        return {"rank": rank, "axis": "dp", "phase": "backward", "start": start, "end": end}

    spans = [(10.0, 14.0), (11.0, 14.5), (12.0, 13.0), (13.5, 15.0), (15.0, 16.0)]  # three at a time at most
    axes = show.timeline([entry(*span) for span in spans] + [entry(10.0, 11.0, rank=2)], marks={2: 12.0}).axes[0]
    own, other = axes.patches[:5], axes.patches[5]
    assert [round(bar.get_width()) for bar in own] == [4000, 1000, 3500, 1000, 1500]  # by lane
    assert len({bar.get_y() for bar in own}) == 3
    for a, b in itertools.combinations(own, 2):
        assert not a.get_bbox().padded(-1e-6).overlaps(b.get_bbox())
    assert math.isclose(3 * own[0].get_height(), 0.8 * other.get_height())  # with a gap between them, in a row as tall
    (mark,) = axes.lines
    assert list(mark.get_xdata()) == [2000, 2000] and min(mark.get_ydata()) < 1 < max(mark.get_ydata())


@pytest.mark.parametrize("p", [2, 3, 8])
def test_column_then_row_draws_every_rank_in_all_three_cut_matrices_and_in_the_sum(p):
    model = LLAMA if p != 3 else find_model("smollm2-135m")
    texts = [text.get_text() for text in show.column_then_row(model, Layout(tp=p)).axes[0].texts]
    for rank in range(p):
        assert texts.count(f"T{rank}") == 5  # gate and up, Y, Y again, down, its part of the sum
    assert f"{model.hidden} × {model.ffn}" in texts


def test_heads_are_those_of_the_spec_and_copies_are_hatched():
    axes = show.heads(LLAMA, Layout(tp=16)).axes[0]
    assert len(axes.patches) == LLAMA.heads + 16  # one KV head on each rank, half of them copies
    assert sum(bool(patch.get_hatch()) for patch in axes.patches) == 8
    assert not any(patch.get_hatch() for patch in show.heads(LLAMA, Layout(tp=8)).axes[0].patches)
    with pytest.raises(ValueError, match="tp = 3"):
        show.heads(LLAMA, Layout(tp=3))


def test_colours_are_distinct_and_ladders_go_from_dark_to_pale():
    colours = [axis.colour for axis in AXES.values()] + list(WORK.values()) + list(LINES)
    assert len(set(colours)) == len(colours) and len({axis.letter for axis in AXES.values()}) == len(AXES)
    steps = ladder(AXES["tp"].colour, 4)
    assert steps[0] == AXES["tp"].colour and sorted(steps, key=lambda c: int(c[3:5], 16)) == steps


def test_text_on_a_colour_has_contrast():
    dark, pale = ("#000000", "#FF0000", "#0000FF", AXES["dp"].colour), ("#FFFFFF", "#00FF00", WORK["forward"])
    assert {on(colour) for colour in dark} == {"white"} and {on(colour) for colour in pale} == {INK}


def test_measured_figures_carry_hardware_and_versions():
    bundle = show.measured(held=1234567, ratio=1.5)._repr_mimebundle_()
    recorded = bundle["application/vnd.shardlab.measured+json"]
    assert recorded["figures"] == {"held": 1234567, "ratio": 1.5}
    assert re.fullmatch(r"\d+ cores \(\w+\), \w+, Python 3[\d.]+, torch [\w.+]+", recorded["machine"])
    assert "1.5" in bundle["text/plain"] and recorded["machine"] in bundle["text/plain"]


def test_a_verdict_explains_a_wrong_prediction_and_agrees_with_a_right_one():
    because = "two a layer"
    assert show.verdict("sums", 80, 160, because) == "sums: 160; you predicted 80\n    two a layer"
    assert show.verdict("sums", 160, 160, because) == "sums: 160, as you predicted"
    assert show.verdict("bytes", None, 16384, because) == "bytes: 16,384\n    two a layer"
    assert "as you predicted" in show.verdict("MB", 179.0, 179.4, because, within=0.01)
    assert "you predicted 170.0" in show.verdict("MB", 170.0, 179.4, because, within=0.01)
    assert "you predicted True" in show.verdict("the loss differs", True, False, because)
    assert "you predicted all_gather" in show.verdict("verb", "all_gather", "all_reduce", because)


@pytest.mark.parametrize("p", [2, 4])
def test_through_a_block_cuts_the_stream_by_tokens_in_the_second_row_alone(p):
    axes = show.through_a_block(LLAMA, Layout(tp=p)).axes[0]
    texts = [text.get_text() for text in axes.texts]
    assert [texts.count(f"T{r}") for r in range(p)] == [4] * p  # Y in both rows, and the two norms of the second
    whole = [patch for patch in axes.patches if patch.get_facecolor() == to_rgba(PALE)]
    assert len(whole) == 4  # X twice, and the two norms of the first row
    assert [texts.count(verb) for verb in ("all-\nreduce", "all-\ngather", "reduce-\nscatter")] == [1, 1, 1]
    with pytest.raises(ValueError, match="tp = 1 cuts nothing"):
        show.through_a_block(LLAMA, Layout())
