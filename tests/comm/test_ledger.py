"""The ledger counts what was handed in, derives what a ring sends, and says where and in which phase."""

import json
import pickle
from contextlib import suppress

import pytest
import torch

from shardlab import comm
from shardlab.comm.ledger import Entry, Ledger
from shardlab.comm.mark import ring_wire
from shardlab.comm.regions import copy_to, reduce_from


def recorded(group):
    r, p = group.rank(), group.size()
    with comm.record() as ledger:
        comm.all_reduce(torch.ones(6), group=group)
        comm.all_gather(torch.ones(5, dtype=torch.float64), group)
        comm.reduce_scatter(torch.ones(2 * p, dtype=torch.bfloat16), group=group)
        comm.broadcast(torch.ones(3), 0, group)
        comm.barrier(group)
        if r < 2:
            x = torch.ones(7, dtype=torch.int64)
            comm.send(x, 1, group) if r == 0 else comm.recv(x, 0, group)
    comm.all_reduce(torch.ones(6), group=group)  # after the block: not in the ledger
    return ledger


def test_payload_is_the_bytes_handed_in_and_wire_what_a_ring_sends(pool):
    p = 3
    for r, ledger in enumerate(pool(p).run(recorded)):
        rows = [(e.op, e.payload, e.wire, e.derived) for e in ledger.entries]
        assert rows[:5] == [("all_reduce", 24, 2 * 2 / 3 * 24, True), ("all_gather", 40, 80, True),
                            ("reduce_scatter", 12, 8, True), ("broadcast", 12, 8, True), ("barrier", 0, 0, False)]
        assert rows[5:] == [[("send", 56, 56, False)], [("recv", 56, 0, False)], []][r]
        assert all(e.rank == r and e.ranks == (0, 1, 2) and e.axis == "world" for e in ledger.entries)
        assert all(e.site.startswith("test_ledger.py:") and e.start <= e.end for e in ledger.entries), ledger.entries
        assert pickle.loads(pickle.dumps(ledger)) == ledger
        assert len(json.loads(json.dumps(ledger.to_dicts()))) == len(ledger.entries)


def there_and_back(group):
    x = torch.ones(4, requires_grad=True)
    with comm.record() as ledger:
        reduce_from(copy_to(x, group) * 2, group).sum().backward()
    return [(e.op, e.phase) for e in ledger.entries]


def test_the_phase_tells_forward_from_backward(pool):
    assert pool(2).run(there_and_back) == [[("all_reduce", "forward"), ("all_reduce", "backward")]] * 2


def nested(group):
    with comm.record() as outer:
        comm.all_reduce(torch.ones(1), group=group)
        with comm.record() as inner:
            comm.all_reduce(torch.ones(2), group=group)
        with comm.record():
            pass
        comm.all_reduce(torch.ones(3), group=group)
    return outer.payload, inner.payload, len(outer.entries)


def test_records_nest(pool):
    assert pool(2).run(nested) == [(24, 8, 3)] * 2


def refused(group):
    with comm.record() as ledger:
        with suppress(ValueError):
            comm.all_reduce(torch.ones(2, dtype=torch.int16), group=group)
        comm.all_reduce(torch.ones(2), group=group)
    return [e.dtype for e in ledger.entries]


def test_what_the_backend_refuses_is_not_counted(pool):
    assert pool(2).run(refused) == [["float32"]] * 2


def entry(**fields):
    given = dict(op="all_reduce", axis="tp", ranks=(0, 1), rank=0, shape=(2, 3), dtype="float32", payload=24, wire=24.0,
                 derived=True, phase="forward", site="here.py:1", start=1.0, end=2.0)
    return Entry(**given | fields)


def test_merge_sum_and_print():
    one = Ledger([entry(), entry(phase="backward", start=3.0)])
    two = Ledger([entry(rank=1, start=0.5), entry(rank=1, phase="backward", start=2.5)])
    both = Ledger.merge([one, two])
    assert [e.start for e in both.entries] == [0.5, 1.0, 2.5, 3.0]
    assert both.payload == 96 and both.where(rank=0).wire == 48 and len(both.where(lambda e: e.start > 1).entries) == 2
    assert str(both).splitlines() == [
        "rank  axis  op          phase     calls  payload B  wire B*",
        "0–1   tp    all_reduce  forward       1         24      24*",
        "0–1   tp    all_reduce  backward      1         24      24*",
        "bytes are of each rank; * derived: what a ring would send"]
    both.entries.append(entry(rank=2, op="send", derived=False))
    assert [row[0] for row in both.table()[1:]] == ["0–1", "0–1", "2"]
    both.entries.append(entry(rank=2, derived=False, algorithm="ring"))  # counted: not in one row with derived ones
    both.entries.append(entry(rank=2))
    rows = [(row[2], row[-1]) for row in both.table()[3:]]
    assert rows == [("send", "24"), ("all_reduce", "24"), ("all_reduce", "24*")]
    del both.entries[-2:]
    assert both._repr_html_().count("<tr>") == 4


def test_a_ring_never_sends_more_than_twice_what_it_is_handed():
    for p in range(1, 9):
        halves = ring_wire("reduce_scatter", 1000, p) + ring_wire("all_gather", 1000 / p, p)
        assert ring_wire("all_reduce", 1000, p) == pytest.approx(halves) and halves < 2000
    assert ring_wire("all_reduce", 1000, 1) == 0


def test_the_flight_recorder_tells_what_a_rank_is_in(tmp_path):
    from shardlab.comm import flight
    assert flight.read(tmp_path / "none") == "no collective entered yet"
    recorder = flight.Recorder(tmp_path / "rank0")
    assert flight.read(tmp_path / "rank0") == "no collective entered yet"
    recorder.enter("all_reduce(sum) float32 (4, 8) on axis tp, ranks [0, 1]")
    inside = flight.read(tmp_path / "rank0")
    assert inside.startswith("in all_reduce(sum) float32 (4, 8) on axis tp, ranks [0, 1], for 0.")
    recorder.leave()
    assert "in its own code" in flight.read(tmp_path / "rank0") and "(4, 8)" in flight.read(tmp_path / "rank0")
    recorder.enter("x" * 10_000)  # longer than the file: cut, not an error
    assert flight.read(tmp_path / "rank0").startswith("in xxx")
