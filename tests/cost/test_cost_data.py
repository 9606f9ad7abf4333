"""What the data axis and ZeRO hold and send, against hand arithmetic. The run confirms it in tests/parity."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.cost import activations, bytes_read, decode_floor, forward_peak, memory, serving, traffic, training
from shardlab.cost.data_rows import DataRows, Rowed
from shardlab.cost.parameters import parameters
from shardlab.cost.sharing import fullest
from shardlab.cost.under_way import under_way
from shardlab.specs import Layout, ModelSpec, find_card, find_model
from shardlab.specs.rows import FlatRow

SIZES = dict(hidden=8, layers=2, heads=2, kv_heads=2, head_dim=4, ffn=10, vocab=7)
SPEC = ModelSpec(**SIZES)
NORM, ATTENTION, MLP, TABLE = 8, 4 * 64, 3 * 80, 56
LAYER = 2 * NORM + ATTENTION + MLP  # 512
TOTAL = 2 * TABLE + 2 * LAYER + NORM  # 1144
SEVENTY = find_model("llama-3.1-70b")


def calls(bill):
    return Counter({(c.axis, c.op, c.phase, c.payload): c.count for c in bill.collectives})


def test_plain_data_parallelism_by_hand():
    """1144 numbers in one row of gradients, and a byte for each of 21 parameters."""
    assert calls(traffic(SPEC, Layout(dp=3), 2, 5)) == {
        ("dp", "all_reduce", "backward", 4 * TOTAL): 1, ("dp", "all_reduce", "finish", 21): 1}
    assert SPEC.total == TOTAL
    bill = memory(SPEC, Layout(dp=3), training=True)
    assert bill.held == bill.per_rank == memory(SPEC, training=True).held  # a data axis takes nothing away


def test_rows_of_gradients_by_hand():
    """Rows of 1,000 bytes, from the end: head and norm and what more of a layer goes in, ..."""
    bill = traffic(SPEC, Layout(dp=3), 2, 5, bucket=1000)
    # (head 56, norm 8, down 80, up 80), (gate 80, norm 8, o 64, v 64), (k 64, q 64, norm 8, down 80), ...
    rows = [224, 216, 216, 80 + 80 + 8 + 64, 64 * 3 + 8]
    rows += [TOTAL - sum(rows)]
    sent = [c.payload for c in bill.where(phase="backward") for _ in range(c.count)]
    assert sorted(sent) == sorted(4 * n for n in rows)


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_1_and_2_by_hand(stage):
    """1144 numbers over 3 ranks are padded to 1146: two halves of an all-reduce, one in each of four passes or once."""
    again = 4 if stage == 2 else 1
    assert calls(traffic(SPEC, Layout(dp=3, zero=stage), 2, 5, accumulate=4)) == {
        ("dp", "reduce_scatter", "backward", 4 * 1146): again, ("dp", "all_reduce", "finish", 21): 1,
        ("dp", "all_gather", "step", 4 * 382): 1}
    bills = [memory(SPEC, Layout(dp=3, zero=stage), training=True, rank=rank) for rank in range(3)]
    for rank, bill in enumerate(bills):
        stepped = 382 - 2 * (rank == 2)
        assert (bill.weights, bill.gradients) == (4 * 1146, 4 * (1146 if stage == 1 else 382))
        assert (bill.moments, bill.master_weights) == (8 * stepped, 0)
    assert sum(bill.steps for bill in bills) == 4 * (21 + 2)  # two parameters are cut through
    worst = memory(SPEC, Layout(dp=3, zero=stage), training=True)
    assert worst.held == max(bill.held for bill in bills) and bills[worst.coordinate].held == worst.held


def test_the_fullest_rank_is_the_one_with_most_pieces_where_numbers_are_equal():
    """Parameters that end where a slice ends are no piece of the next one: 2 + 2 pieces on the first rank, 1 + 2."""
    rows = [Rowed(FlatRow(sizes, 2), []) for sizes in ((1, 2, 3), (1, 2, 1, 2))]
    assert fullest(rows, 2, 8, 4) == 0
    assert fullest([Rowed(FlatRow((3, 1, 2), 2), [])], 2, 8, 4) == 1
    assert fullest([Rowed(FlatRow((3, 1, 1), 2), [])], 2, 8, 4) == 0  # its number more weighs 8, the piece more 4


@pytest.mark.parametrize("tied", [False, True])
def test_zero_3_by_hand(tied):
    """Units: 56 of the embedding, 512 of a block, 64 of norm and head; or 64 of both ends, gathered for each."""
    spec = ModelSpec(**SIZES, tied=tied)
    expected = Counter({("dp", "all_reduce", "finish", 20 + (not tied)): 1})
    ends = [(64, 2)] if tied else [(56, 1), (64, 1)]
    for numbers, times in ends:
        expected["dp", "all_gather", "forward", 4 * -(-numbers // 3)] += 3 * times
        expected["dp", "reduce_scatter", "backward", 4 * 3 * -(-numbers // 3)] += 3
    for phase in ("forward", "backward"):
        expected["dp", "all_gather", phase, 4 * 171] += 2 * 3
    expected["dp", "reduce_scatter", "backward", 4 * 513] += 2 * 3
    assert calls(traffic(spec, Layout(dp=3, zero=3), 2, 5, accumulate=3)) == expected
    bill = memory(spec, Layout(dp=3, zero=3), training=True)
    assert bill.weights == bill.gradients == 4 * (2 * 171 + sum(-(-n // 3) for n, _ in ends))


def test_half_precision_has_its_masters_and_its_sum_of_gradients_in_fp32():
    """2 + 2 + 12 bytes a parameter: with the whole gradients, 4 more of each rank's own; in stage 3, 18 shared out."""
    rest = SEVENTY.total / 64
    for stage, whole, part in ((1, 4, 16), (2, 2, 16), (3, 0, 18)):
        bill = memory(SEVENTY, Layout(dp=64, zero=stage), "bf16", training=True)
        assert bill.held - bill.steps == whole * SEVENTY.total + part * rest
        assert bill.master_weights == bill.moments / 2 == 4 * rest
        paper = memory(SEVENTY, Layout(dp=64, zero=stage), "bf16", training=True, gradients="bf16")
        assert paper.held - paper.steps == (whole * SEVENTY.total + (10 + 2 * stage) * rest)


def test_what_is_frozen_is_held_and_sends_nothing():
    frozen = ("layers.0", "embed_tokens")
    bill = memory(SPEC, Layout(dp=3), training=True, frozen=frozen)
    left = TOTAL - LAYER - TABLE
    assert (bill.weights, bill.gradients, bill.moments, bill.steps) == (4 * TOTAL, 4 * left, 8 * left, 4 * 11)
    assert traffic(SPEC, Layout(dp=3), 2, 5, frozen=frozen).total() == 4 * left + 11
    third = traffic(SPEC, Layout(dp=3, zero=3), 2, 5, frozen=frozen)
    assert third.count("all_gather", "forward") == 4 and third.count("all_gather", "backward") == 1
    deep = traffic(SPEC, Layout(2), 2, 5, frozen=("embed_tokens", "layers.0", "layers.1.input_layernorm"))
    assert {c.what: c.count for c in deep.where(phase="backward")} == {"head in": 1, "mlp in": 1}


@settings(deadline=None, max_examples=30)
@given(dp=st.integers(2, 5), stage=st.integers(1, 3), hidden=st.integers(1, 9), vocab=st.integers(1, 30),
       ffn=st.integers(1, 30), tied=st.booleans(), bucket=st.integers(1, 3000))
def test_the_ranks_share_out_the_model_and_no_less(dp, stage, hidden, vocab, ffn, tied, bucket):
    spec = ModelSpec(**SIZES | dict(hidden=hidden, vocab=vocab, ffn=ffn, tied=tied))
    layout = Layout(dp=dp, zero=stage)
    bills = [memory(spec, layout, training=True, rank=rank, bucket=bucket) for rank in range(dp)]
    assert sum(bill.moments for bill in bills) == 8 * spec.total  # what is stepped: each number once
    assert sum(bill.steps for bill in bills) >= 4 * sum(1 for _ in spec.tensors())
    assert max(bill.held for bill in bills) == memory(spec, layout, training=True, bucket=bucket).held
    if stage == 3:
        assert sum(bill.weights for bill in bills) >= 4 * spec.total
    sent = traffic(spec, layout, 1, 1, bucket=bucket)
    assert sent.total("reduce_scatter") >= 4 * spec.total


def test_rings_send_with_zero_1_and_2_what_they_send_without():
    wires = [traffic(SEVENTY, Layout(dp=8, zero=stage), 1, 1, "bf16").wire() for stage in range(4)]
    assert wires[0] == wires[1] == wires[2]
    assert wires[3] / wires[0] == pytest.approx(1.5, rel=0.02)  # embedding and head are gathered once
    accumulated = [traffic(SEVENTY, Layout(dp=8, zero=stage), 1, 1, "bf16", accumulate=4).wire() for stage in range(4)]
    assert accumulated[:2] == wires[:2]
    assert accumulated[2] / wires[2] == pytest.approx(2.5, rel=1e-3)
    assert accumulated[3] / wires[3] == pytest.approx(4, rel=1e-3)


def test_what_begins_and_what_surrounds_a_step():
    bill = traffic(SPEC, Layout(2, dp=3, zero=1), 2, 5, start=True, loop=True)
    held = memory(SPEC, Layout(2)).weights
    assert (bill.count("broadcast", "start"), bill.total("broadcast", "start")) == (21, held)
    assert (bill.count("all_gather", "start"), bill.total("all_gather", "start")) == (1, 4 * 8)  # which model each has
    assert bill.where("broadcast")[0].wire == 2 / 3 * bill.where("broadcast")[0].payload
    assert bill.where("broadcast")[0].hops == 2
    assert [(c.axis, c.payload) for c in bill.where(phase="clip")] == [("tp", 8), ("dp", 8)]
    plain = traffic(SPEC, Layout(2, dp=3, zero=1), 2, 5)
    assert bill.count(axis="dp") - bill.count(phase="start") == plain.count(axis="dp") + 3
    assert bill.count(axis="tp") == plain.count(axis="tp") + 1


def test_sequence_parallelism_by_hand():
    """9 tokens over 2 ranks: 10 rows, 5 on each; as many bytes forward as the all-reduces, and a half more behind."""
    whole, keep, again = (traffic(SPEC, Layout(2, sp=sp), 1, 9) for sp in (False, "keep", "again"))
    row = 8 * 4
    assert [(c.op, c.count, c.payload) for c in keep.where(phase="forward") if "loss" not in c.what] == [
        ("reduce_scatter", 1, 10 * row), ("all_gather", 2, 5 * row), ("reduce_scatter", 2, 10 * row),
        ("all_gather", 2, 5 * row), ("reduce_scatter", 2, 10 * row), ("all_gather", 1, 5 * row)]
    assert keep.count("all_gather", "backward") == keep.count("reduce_scatter", "backward") == 5
    assert again.count("all_gather", "backward") - keep.count("all_gather", "backward") == 5
    assert keep.total(phase="finish") == 5 * 8 * 4  # the norms, whole on both
    even = [traffic(SPEC, Layout(2, sp=sp), 1, 10) for sp in (False, "keep", "again")]
    for phase in ("forward", "backward"):
        assert even[0].wire(phase=phase) == even[1].wire(phase=phase) < (9 / 8 * whole.wire(phase=phase) + 1)
    assert even[2].wire(phase="backward") == 1.5 * even[1].wire(phase="backward")


def test_a_slice_of_the_sequence_is_kept():
    """Korthikanti: what tensor parallelism leaves whole is shared out too."""
    kept = {sp: activations(SEVENTY, Layout(8, sp=sp), batch=1, seq=8192, dtype="bf16", device="cuda").per_layer
            for sp in (False, "keep", "again")}
    stream = 8192 * 8192 * 2
    norms = 2 * (stream + 8192 * 4)  # inputs of two norms, and a number a token
    assert kept[False] - kept["keep"] == norms - norms // 8
    assert kept["keep"] - kept["again"] == 2 * (stream - stream // 8)


def test_what_is_whole_for_a_moment_by_hand():
    """Two rows of gradients; or the weights of two blocks, and the gradients of two. A tied row of both ends is there
    all the time. With few blocks or a large head the moment is another."""
    def moment(stage, layers=3, **more):
        spec = ModelSpec(**SIZES | dict(layers=layers, **more))
        return under_way(DataRows(parameters(spec), Layout(dp=2, zero=stage), spec.tied, 4, 1000))

    assert moment(1) == (0, 0) and moment(2) == (0, 232 + 216)
    assert moment(3) == (2 * LAYER, 2 * LAYER)
    assert moment(3, tied=True) == (2 * LAYER, 2 * LAYER + TABLE + NORM)
    assert moment(3, layers=2) == (2 * LAYER, LAYER + TABLE + NORM)
    assert moment(3, layers=1, vocab=199) == (199 * 8 + NORM + LAYER, 199 * 8 + NORM)  # the head, before the block
    assert moment(3, vocab=199) == (199 * 8 + NORM + LAYER, 199 * 8 + NORM)
    step = training(SEVENTY, Layout(dp=8, zero=3), batch=1, seq=64)
    layer = sum(tensor.size for tensor in SEVENTY.layer_tensors())
    assert step.part("under way") >= 2 * 4 * layer and step.per_rank == step.held + sum(p.nbytes for p in step.parts)
    parts = [training(SEVENTY, Layout(dp=8, zero=stage), batch=1, seq=64).part("under way") for stage in (1, 2)]
    assert parts == [0, 2 * (SEVENTY.vocab * SEVENTY.hidden + SEVENTY.hidden)]  # head and norm in bf16


@pytest.mark.parametrize(("call", "message"), [
    (lambda: memory(SPEC, Layout(dp=2, zero=1), training=True, frozen="layers.0"), r"is one name: give several"),
    (lambda: memory(SPEC, training=True, frozen=("layers.7",)), "model has no layers.7 to freeze$"),
    (lambda: traffic(ModelSpec(**SIZES, tied=True), Layout(2), 1, 1, frozen=("lm_head",)), "its head is the embedding"),
    (lambda: memory(SPEC, Layout(2, dp=2), rank=4), "rank = 4 is none of 4 ranks: the last is 3"),
    (lambda: traffic(SPEC, Layout(dp=2), 1, 1, rank=-1), "rank must be a whole number"),
    (lambda: traffic(SPEC, Layout(dp=2), 1, 1, accumulate=0), "accumulate must be a whole number of at least 1"),
    (lambda: traffic(SPEC, Layout(dp=2), 1, 1, bucket=0), "bucket must be a whole number of at least 1"),
    (lambda: memory(SPEC, Layout(dp=2, zero=1), "int8"), "weights stored as int8 are served, not trained"),
    (lambda: memory(SPEC, Layout(dp=2, zero=1), training=True).groups, "not told by groups of tensors under ZeRO"),
    (lambda: serving(SPEC, Layout(dp=2, zero=3), context=8), "dp = 2, ZeRO-3: what ZeRO and sequence parallelism save"),
    (lambda: bytes_read(SPEC, Layout(dp=2, zero=3)), "leave zero and sp out"),
    (lambda: forward_peak(SPEC, Layout(2, sp="keep"), tokens=3), "leave zero and sp out"),
])
def test_what_cannot_be_billed_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_replica_serves_its_own_requests():
    card = find_card("h100")
    one, two = (decode_floor(SEVENTY, card, Layout(8, dp=dp), batch=4096) for dp in (1, 2))
    assert one == two
