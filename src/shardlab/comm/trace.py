"""A ledger as a picture that Perfetto (ui.perfetto.dev) and chrome://tracing open: Chrome's Trace Event Format, JSON.

A process is a rank, a thread of it one of its axes: operations are slices there. Messages have two threads more, since
each is drawn at both ends, "to rank 1" where it is sent and "from rank 0" where it is received, with an arrow from the
one to the other. Only its sender has timed it, so both slices last from when it was handed over to when it was gone.

Rules of the format (Trace Event Format, Google, 2016) that a viewer does not forgive: slices of one thread nest or
keep apart, so what overlaps on an axis gets a further thread, "tp (2)"; an arrow's ends lie inside of slices; a
thread's number is no other's, nor a process's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

TICKS = 8  # a microsecond: eighths of it are exact both in a float and in Perfetto's whole nanoseconds
SENT, RECEIVED = "messages sent", "messages received"
ARGS = ("payload", "wire", "derived", "shape", "dtype", "ranks", "phase", "site", "algorithm", "transport", "staged")


class _Slice(NamedTuple):
    """A bar of the picture; times in ticks since the first start. `flow` is the number of the message, if it is one."""

    rank: int
    track: str
    name: str
    start: int
    end: int
    cat: str
    args: dict
    flow: int = 0


def chrome_trace(entries: Sequence[dict]) -> str:
    """The JSON text for the entries of `Ledger.to_dicts()`, of one rank or of several on one host.

    Times are microseconds from the first start, rounded to eighths; what takes less is drawn as one eighth, and what
    has not ended as lasting until the last end, `unfinished` among its args. Bytes are bytes. Raises ValueError where
    there are no entries.
    """
    if not entries:
        raise ValueError("the ledger is empty, so there is nothing to draw: run collectives inside comm.record()")
    slices = _slices(entries)
    events = []
    for number, (rank, name, lane) in enumerate(_threads(slices), 1 + max(s.rank for s in slices)):
        where = {"pid": rank, "tid": number}
        events += _names(where, f"rank {rank}", name)
        for s in lane:
            times = {"ts": s.start / TICKS, "dur": (s.end - s.start) / TICKS}
            events.append({"ph": "X", "name": s.name, "cat": s.cat, **times, **where, "args": s.args})
            if s.flow:
                events.append(_end_of_arrow(s) | where)
    events.sort(key=lambda e: (e.get("ts", -1), "MXsf".index(e["ph"])))  # Perfetto reads arrows in this order only
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _slices(entries: Sequence[dict]) -> list[_Slice]:
    """A slice for each operation, and two for each message."""
    spans = [*entries, *(m for e in entries for m in e.get("messages", ()))]
    first, last = min(s["start"] for s in spans), max(max(s["start"], s["end"]) for s in spans)

    def times(span: dict) -> tuple[int, int, dict]:
        unfinished = span["end"] < span["start"]
        start, end = (round((t - first) * 1e6 * TICKS) for t in (span["start"], last if unfinished else span["end"]))
        return start, max(end, start + 1), {"unfinished": True} if unfinished else {}

    slices, numbers = [], count(1)
    for e in entries:
        start, end, more = times(e)
        args = {name: e[name] for name in ARGS if name in e}
        slices.append(_Slice(e["rank"], e["axis"], e["op"], start, end, e["phase"], args | more))
        for m in e.get("messages", ()):
            start, end, more = times(m)
            args = {"bytes": m["nbytes"], "offset": m["offset"], "link": m["link"], "op": e["op"], "axis": e["axis"]}
            same, flow = (start, end, "message", args | more), next(numbers)
            slices.append(_Slice(m["src"], SENT, f"to rank {m['dst']}", *same, flow))
            slices.append(_Slice(m["dst"], RECEIVED, f"from rank {m['src']}", *same, flow))
    return slices


def _threads(slices: Sequence[_Slice]) -> list[tuple[int, str, list[_Slice]]]:
    """(rank, name, slices that follow one another), by rank: its axes in order of first use, then its messages."""
    tracks: dict[tuple[int, str], list[_Slice]] = {}
    for s in slices:
        tracks.setdefault((s.rank, s.track), []).append(s)
    threads, last = [], {SENT: 1, RECEIVED: 2}
    for rank, name in sorted(tracks, key=lambda track: (track[0], last.get(track[1], 0))):
        lanes: list[list[_Slice]] = []
        for s in sorted(tracks[rank, name], key=lambda s: s.start):
            lane = next((lane for lane in lanes if lane[-1].end <= s.start), None)
            if lane is None:
                lanes.append(lane := [])
            lane.append(s)
        threads += [(rank, name if i == 1 else f"{name} ({i})", lane) for i, lane in enumerate(lanes, 1)]
    return threads


def _names(where: dict, process: str, thread: str) -> list[dict]:
    """What to call a thread and its process, and where to draw them: in order of their numbers."""
    return [{"ph": "M", "name": "process_name", **where, "args": {"name": process}},
            {"ph": "M", "name": "process_sort_index", **where, "args": {"sort_index": where["pid"]}},
            {"ph": "M", "name": "thread_name", **where, "args": {"name": thread}},
            {"ph": "M", "name": "thread_sort_index", **where, "args": {"sort_index": where["tid"]}}]


def _end_of_arrow(s: _Slice) -> dict:
    """The arrow leaves at the start of what was sent, and comes in a tick before the end of what was received."""
    if s.track == SENT:
        return {"ph": "s", "id": s.flow, "name": "message", "cat": "message", "ts": s.start / TICKS}
    return {"ph": "f", "bp": "e", "id": s.flow, "name": "message", "cat": "message", "ts": (s.end - 1) / TICKS}
