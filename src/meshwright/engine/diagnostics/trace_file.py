"""Write the work of all ranks as a Chrome trace: a process for each rank, a row for each kind of event and stream."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from meshwright.comm import StreamWork

from .traced_call import TracedCall
from .traced_work import TracedWork

ROWS = ("work", "communication", "communication aside")
WORK, OWN, ASIDE = range(3)
Event = dict[str, Any]


def rank_events(
    rank: int, calls: Sequence[TracedCall], works: Sequence[TracedWork], streams: Sequence[StreamWork] = ()
) -> Iterator[Event]:
    """Yield the events of one rank; times are seconds since 1970."""
    for work in works:
        yield _lasting(rank, WORK, work.kind, f"{work.kind} {work.name}", work.began, work.seconds, {})
    numbers: Counter[tuple[int, int, int]] = Counter()
    for call in calls:
        row = ASIDE if call.aside else OWN
        told = {
            "call": call.text,
            "bytes": call.received,
            "ranks": list(call.group),
            "axes": list(call.axes),
            "pass": call.stage,
            "line": call.line,
            "module": call.module,
        }
        name = " ".join(filter(None, [call.step or call.kind, call.module]))
        yield _lasting(rank, row, call.kind, name, call.began, call.seconds, told)
        if call.peer is not None:
            yield _arrow(rank, row, call, numbers)
    yield from _stream_events(rank, streams)


def _stream_events(rank: int, streams: Sequence[StreamWork]) -> Iterator[Event]:
    """Yield the work on communication streams, with a named row for each stream."""
    rows = {name: row for row, name in enumerate(dict.fromkeys(work.stream for work in streams), len(ROWS))}
    for work in streams:
        yield _lasting(rank, rows[work.stream], "stream", work.what, work.began, work.seconds, {})
    for name, row in rows.items():
        yield {**_row_name(rank, row, f"stream: {name}"), "ts": streams[0].began}


def _lasting(rank: int, row: int, kind: str, name: str, began: float, seconds: float, told: Mapping[str, Any]) -> Event:
    place = {"pid": rank, "tid": row, "ts": began, "dur": seconds}
    return {"name": name, "cat": kind, "ph": "X", **place, "args": dict(told)}


def _arrow(rank: int, row: int, call: TracedCall, numbers: Counter[tuple[int, int, int]]) -> Event:
    """Return one end of a message's arrow; messages with one tag arrive in the order in which they were sent."""
    assert call.peer is not None
    sends = call.kind == "send"
    route = (rank, call.peer, call.tag) if sends else (call.peer, rank, call.tag)
    number = numbers[route]
    numbers[route] += 1
    source, target, tag = route
    end = {"ph": "s", "ts": call.began} if sends else {"ph": "f", "bp": "e", "ts": call.began + call.seconds}
    named = {"name": "message", "cat": "message", "id": f"{source} to {target}, tag {tag}, {number}"}
    return {**named, "pid": rank, "tid": row, **end}


def trace_file(ranks: Iterable[Sequence[Event]]) -> str:
    """Return the trace file of all ranks; times are microseconds since the first event."""
    every = [list(events) for events in ranks]
    first = min((event["ts"] for events in every for event in events), default=0.0)
    named = [event for rank in range(len(every)) for event in _names(rank)]
    timed = [_in_microseconds(event, first) for events in every for event in events]
    timed.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    return json.dumps({"traceEvents": [*named, *timed], "displayTimeUnit": "ms"}) + "\n"


def _names(rank: int) -> Iterator[Event]:
    yield {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
    yield {"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}}
    for row, name in enumerate(ROWS):
        yield _row_name(rank, row, name)


def _row_name(rank: int, row: int, name: str) -> Event:
    return {"name": "thread_name", "ph": "M", "pid": rank, "tid": row, "args": {"name": name}}


def _in_microseconds(event: Event, first: float) -> Event:
    times = {"ts": 1e6 * (event["ts"] - first)}
    return {**event, **times, **({"dur": 1e6 * event["dur"]} if "dur" in event else {})}
