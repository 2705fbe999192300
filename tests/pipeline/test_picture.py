"""Pictures of timelines: what stands in them, not how they look."""

from __future__ import annotations

import json
from xml.etree import ElementTree

from meshwright.pipeline import dualpipe, one_f_one_b, simulate, svg, terminal, trace, zb_v


def test_terminal_keeps_to_its_width() -> None:
    for width in (20, 60, 200):
        lines = terminal(simulate(one_f_one_b(4, 8)), width).splitlines()
        assert len(lines) == 5
        assert max(map(len, lines[:4])) <= width + 2
    assert "bubble 27.3 %" in lines[-1]


def test_terminal_shows_actions_at_their_times() -> None:
    picture = terminal(simulate(one_f_one_b(2, 2)), 36).splitlines()
    assert picture[0] == "0 F0  F1          BW0         BW1"
    assert picture[1].index("BW0") == 2 + 8


def test_colours_are_asked_for() -> None:
    line = simulate(one_f_one_b(2, 2))
    assert "\x1b[" not in terminal(line)
    assert "\x1b[44mF0" in terminal(line, colour=True)


def test_svg_has_a_box_for_each_action_with_its_name() -> None:
    for schedule in (one_f_one_b(2, 4), zb_v(2, 4), dualpipe(2, 4)):
        root = ElementTree.fromstring(svg(simulate(schedule)))
        tips = [t.text or "" for t in root.iter("{http://www.w3.org/2000/svg}title")][1:]
        assert {tip.split()[0] for tip in tips} == {str(atom) for _, atom in schedule.atoms()}


def test_trace_is_json_with_an_event_per_action() -> None:
    schedule = zb_v(2, 4)
    found = json.loads(trace(simulate(schedule)))["traceEvents"]
    events = [e for e in found if e["ph"] == "X"]
    assert len(events) == sum(map(len, schedule.rows))
    assert min(e["ts"] for e in events) == 0
