"""A ledger's trace keeps the rules of Chrome's Trace Event Format, as Perfetto and chrome://tracing read them."""

import json
from itertools import pairwise

import pytest
import torch

from shardlab import comm
from shardlab.comm.trace import chrome_trace

FIELDS = {"M": {"name", "pid", "tid", "args"}, "X": {"name", "cat", "ts", "dur", "pid", "tid", "args"},
          "s": {"name", "cat", "id", "ts", "pid", "tid"}, "f": {"name", "cat", "id", "ts", "pid", "tid", "bp"}}


def entry(rank, start, end, op="all_reduce", axis="tp", messages=()):
    """What Ledger.to_dicts() gives, for ranks 0 to 2."""
    return {"op": op, "axis": axis, "ranks": (0, 1, 2), "rank": rank, "shape": (6,), "dtype": "float32", "payload": 24,
            "wire": 32.0, "derived": False, "phase": "forward", "site": "lab.py:7", "start": start, "end": end,
            "algorithm": "ring", "transport": "gloo", "staged": False,
            "messages": [{"src": rank, "dst": dst, "nbytes": 8, "offset": offset, "link": "slow", "start": a, "end": b}
                         for dst, offset, a, b in messages]}


RING = [entry(0, 100.0, 100.5, messages=[(1, 0, 100.1, 100.2), (1, -1, 100.2, 100.4)]),
        entry(1, 100.05, 100.6, messages=[(2, 8, 100.1, 100.3), (2, 16, 100.15, 100.25)]),  # at the same time
        entry(2, 100.0, 100.7, messages=[(0, 16, 100.1, 100.10000001)])]  # in less than a tick


def events_of(text):
    """All events, checked: the rules, each with what a viewer does where it is broken."""
    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    events = json.loads(text, parse_constant=refuse)["traceEvents"]
    for e in events:  # is left out
        assert e.keys() - {"ph"} == FIELDS[e["ph"]], e
        assert e["ph"] == "M" or (e["ts"] >= 0 and e["ts"] % 0.125 == 0), "Perfetto drops times below 0, cuts to ns"
        assert e["ph"] != "X" or (e["dur"] > 0 and e["dur"] % 0.125 == 0)
        assert e["ph"] != "f" or e["bp"] == "e", "the arrow would go to the next slice instead"
    names = {name: {(e["pid"], e["tid"]): e["args"] for e in events if e["ph"] == "M" and e["name"] == name}
             for name in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")}
    threads = {(e["pid"], e["tid"]) for e in events}
    assert all(of.keys() == threads for of in names.values()), "shown as a number"
    tids = [tid for _, tid in threads]
    assert len(set(tids)) == len(tids) and not {pid for pid, _ in threads} & set(tids), "Perfetto mixes threads up"
    for thread in threads:  # Perfetto drops slices that overlap
        on = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == thread)
        assert all(end <= start for (_, end), (start, _) in pairwise(on)), on
    order = [(e["ts"], "Xsf".index(e["ph"])) for e in events if e["ph"] != "M"]
    assert order == sorted(order), "an arrow before its slice is dropped"
    return events


def named(events):
    """(process, thread, slice) of each slice, with its event."""
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events
             if e["ph"] == "M" and e["name"] in ("process_name", "thread_name")}
    return [(names["process_name", e["pid"], e["tid"]], names["thread_name", e["pid"], e["tid"]], e["name"], e)
            for e in events if e["ph"] == "X"]


def around(events, point):
    """The (process, thread, slice) that an arrow's end lies in."""
    inside = [tuple(s) for *s, e in named(events) if (e["pid"], e["tid"]) == (point["pid"], point["tid"])
              and e["ts"] <= point["ts"] < e["ts"] + e["dur"]]
    assert len(inside) == 1, (point, inside)
    return inside[0]


def test_operations_are_slices_on_their_axis_in_microseconds():
    ops = [(*s, e["ts"], e["dur"]) for *s, e in named(events_of(chrome_trace(RING))) if s[1] == "tp"]
    assert sorted(ops) == [("rank 0", "tp", "all_reduce", 0, 500_000), ("rank 1", "tp", "all_reduce", 50_000, 550_000),
                           ("rank 2", "tp", "all_reduce", 0, 700_000)]
    args = next(e["args"] for *_, name, e in named(events_of(chrome_trace(RING))) if name == "all_reduce")
    assert args == {"payload": 24, "wire": 32, "derived": False, "shape": [6], "dtype": "float32", "ranks": [0, 1, 2],
                    "phase": "forward", "site": "lab.py:7", "algorithm": "ring", "transport": "gloo", "staged": False}


def test_an_arrow_goes_from_each_message_sent_to_where_it_is_received():
    events = events_of(chrome_trace(RING))
    starts, ends = ({e["id"]: e for e in events if e["ph"] == ph} for ph in "sf")
    assert len(starts) == len(ends) == 5 and starts.keys() == ends.keys()
    arrows = sorted((around(events, starts[i]), around(events, ends[i])) for i in starts)
    assert arrows == [
        (("rank 0", "messages sent", "to rank 1"), ("rank 1", "messages received", "from rank 0"))] * 2 + [
        (("rank 1", "messages sent", "to rank 2"), ("rank 2", "messages received", "from rank 1")),
        (("rank 1", "messages sent (2)", "to rank 2"), ("rank 2", "messages received (2)", "from rank 1")),
        (("rank 2", "messages sent", "to rank 0"), ("rank 0", "messages received", "from rank 2"))]
    for i, start in starts.items():
        assert start["ts"] <= ends[i]["ts"] and start["name"] == ends[i]["name"] and start["cat"] == ends[i]["cat"]
    sent = [e for *_, name, e in named(events) if name == "to rank 1"]
    assert [(e["ts"], e["dur"], e["args"]["offset"]) for e in sent] == [(100_000, 100_000, 0), (200_000, 200_000, -1)]
    assert sent[0]["args"] == {"bytes": 8, "offset": 0, "link": "slow", "op": "all_reduce", "axis": "tp"}
    assert [e["dur"] for *_, name, e in named(events) if name == "from rank 2"] == [0.125]


def test_what_overlaps_on_an_axis_has_threads_of_its_own():
    together = [entry(0, 5.0, 5.3), entry(0, 5.1, 5.5, "all_gather"), entry(0, 5.3, 5.4), entry(0, 5.0, 5.5, axis="dp")]
    threads = [(thread, name) for _, thread, name, _ in named(events_of(chrome_trace(together)))]
    assert sorted(threads) == [("dp", "all_reduce"), ("tp", "all_reduce"), ("tp", "all_reduce"),
                               ("tp (2)", "all_gather")]


def test_what_has_not_ended_lasts_until_the_end():
    hanging = [entry(0, 5.0, 5.25), entry(1, 5.0, 0.0, messages=[(0, 0, 5.125, 0.0)])]
    drawn = {s[0]: (e["ts"], e["dur"], e["args"].get("unfinished")) for *s, e in named(events_of(chrome_trace(hanging)))
             if s[1] == "tp"}
    assert drawn == {"rank 0": (0, 250_000, None), "rank 1": (0, 250_000, True)}
    sent = next(e for *_, name, e in named(events_of(chrome_trace(hanging))) if name == "to rank 0")
    assert (sent["ts"], sent["dur"], sent["args"]["unfinished"]) == (125_000, 125_000, True)


def recorded(group):
    """Two reductions under way at once, one made of messages, and a message."""
    with comm.record() as ledger:
        first, second = (comm.all_reduce(torch.ones(n), group=group, async_op=True) for n in (1000, 10))
        first.wait(), second.wait()
        with comm.use("ring"):
            comm.all_reduce(torch.ones(6), group=group)
        x = torch.ones(3)
        comm.send(x, 1, group) if group.rank() == 0 else comm.recv(x, 0, group)
    return ledger


def test_a_recorded_ledger_keeps_the_rules(pool):
    events = events_of(comm.Ledger.merge(pool(2).run(recorded)).to_chrome_trace())
    ops = [s for *s, _ in named(events) if not s[1].startswith("messages")]
    assert sorted(op for _, _, op in ops) == ["all_reduce"] * 6 + ["recv", "send"]
    assert {(rank, thread) for rank, thread, _ in ops} == {
        (f"rank {r}", thread) for r in (0, 1) for thread in ("world", "world (2)")}
    to = sorted(around(events, e)[2] for e in events if e["ph"] == "s")
    assert to == ["to rank 0"] * 2 + ["to rank 1"] * 3  # two pieces each around the ring, and the message


def test_an_empty_ledger_is_refused():
    with pytest.raises(ValueError, match=r"nothing to draw.*comm\.record"):
        chrome_trace([])
