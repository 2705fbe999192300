"""Pictures of timelines: their contents, not their appearance."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from meshwright.pipeline import (
    dualpipe,
    one_f_one_b,
    perfetto_trace,
    simulate_schedule,
    timeline_svg,
    timeline_text,
    zb_v,
)


def test_terminal_output_keeps_its_width() -> None:
    for width in (20, 60, 200):
        lines = timeline_text(simulate_schedule(one_f_one_b(4, 8)), width).splitlines()
        assert len(lines) == 5
        assert max(map(len, lines[:4])) <= width + 2
    assert "bubble 27.3 %" in lines[-1]


def test_terminal_output_shows_actions_at_their_times() -> None:
    picture = timeline_text(simulate_schedule(one_f_one_b(2, 2)), 36).splitlines()
    assert picture[0] == "0 F0  F1          BW0         BW1"
    assert picture[1].index("BW0") == 2 + 8


def test_colours_need_an_option() -> None:
    line = simulate_schedule(one_f_one_b(2, 2))
    assert "\x1b[" not in timeline_text(line)
    assert "\x1b[44mF0" in timeline_text(line, colour=True)


def test_svg_has_a_box_for_each_action_with_its_name() -> None:
    for schedule in (one_f_one_b(2, 4), zb_v(2, 4), dualpipe(2, 4)):
        root = ElementTree.fromstring(timeline_svg(simulate_schedule(schedule)))
        tips = [t.text or "" for t in root.iter("{http://www.w3.org/2000/svg}title")][1:]
        assert {tip.split()[0] for tip in tips} == {str(atom) for _, atom in schedule.atoms()}


def test_boxes_are_at_their_times_and_ranks() -> None:
    """Starts and widths of boxes are proportional to seconds; simultaneous boxes share the height of a row."""
    for schedule in (one_f_one_b(2, 4), zb_v(2, 4), dualpipe(2, 4)):
        line = simulate_schedule(schedule)
        boxes = list(ElementTree.fromstring(timeline_svg(line)).iter("{http://www.w3.org/2000/svg}g"))
        found = [{k: float(v) for k, v in g[1].attrib.items() if k in ("x", "y", "width", "height")} for g in boxes]
        timed = [(r, t, n) for r, row in enumerate(line.rows) for t in row for n, _ in enumerate(t.action.atoms)]
        assert len(found) == len(timed)
        first, second = found[0], found[1]
        scale = first["width"] / (timed[0][1].end - timed[0][1].start)
        tops = [min(box["y"] for box, (r, _, _) in zip(found, timed, strict=True) if r == rank) for rank in range(2)]
        assert tops[0] < second["y"] + second["height"] <= tops[1]
        for box, (rank, t, n) in zip(found, timed, strict=True):
            atoms = len(list(t.action.atoms))
            assert box["x"] - first["x"] == pytest.approx(t.start * scale, abs=0.02)
            assert box["width"] == pytest.approx((t.end - t.start) * scale, abs=0.02)
            assert box["y"] == pytest.approx(tops[rank] + n * box["height"], abs=0.02)
            assert box["height"] * atoms == pytest.approx(first["height"], abs=0.02)


def test_trace_is_json_with_an_event_per_action() -> None:
    schedule = zb_v(2, 4)
    found = json.loads(perfetto_trace(simulate_schedule(schedule)))["traceEvents"]
    events = [e for e in found if e["ph"] == "X"]
    assert len(events) == sum(map(len, schedule.rows))
    assert min(e["ts"] for e in events) == 0
    for event in events:
        timed = next(t for t in simulate_schedule(schedule).rows[event["tid"]] if str(t.action) == event["name"])
        assert (event["ts"], event["dur"]) == (timed.start * 1e6, (timed.end - timed.start) * 1e6)
        assert event["cat"] == str(timed.action.kind)
    assert (
        json.loads(perfetto_trace(simulate_schedule(schedule), seconds=0.5))["traceEvents"][-1]["ts"]
        == events[-1]["ts"] / 2
    )
    named = {e["tid"]: e["args"]["name"] for e in found if e["ph"] == "M"}
    assert named == {0: "rank 0", 1: "rank 1"}
