"""Pipelines: closed forms of the known schedules, and published bubbles from published times.

Closed forms (makespan, span, peak) for p <= 8 ranks, m <= 4p microbatches and v <= 4 chunks. The bubbles are
those of table 5 of "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241v1), from the profiled times of its table 9.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.pipeline import (
    KNOWN_SCHEDULES,
    KnownSchedule,
    Schedule,
    ScheduleError,
    ScheduleSizes,
    Times,
    check_schedule,
    schedule_by_name,
    simulate_schedule,
)

CLOSE, CLOSE_BUBBLE = 1e-9, 1e-4

# (model, m) -> F, B, W and message in ms; table 9
PROFILED = {
    ("1.5B", 24): (18.522, 18.086, 9.337, 0.601),
    ("1.5B", 32): (18.513, 18.086, 9.331, 0.626),
    ("1.5B", 64): (18.546, 18.097, 9.321, 0.762),
    ("6.2B", 24): (29.718, 29.444, 19.927, 0.527),
    ("6.2B", 32): (29.802, 29.428, 19.53, 0.577),
    ("6.2B", 64): (29.935, 29.621, 19.388, 0.535),
}
# (model, m) -> bubble rates of the schedules below; table 5, p = 8
PUBLISHED_SCHEDULES = ("1F1B", "ZB-H1", "ZB-H2", "ZB-1p", "ZB-2p")
PUBLISHED = {
    ("1.5B", 24): (0.2431, 0.1585, 0.1083, 0.1585, 0.0433),
    ("1.5B", 32): (0.1985, 0.1242, 0.0837, 0.1242, 0.0039),
    ("1.5B", 64): (0.124, 0.0674, 0.0444, 0.0674, 0.0026),
    ("6.2B", 24): (0.2347, 0.1323, 0.0698, 0.1323, 0.0029),
    ("6.2B", 32): (0.1898, 0.1045, 0.0559, 0.1045, 0.0022),
    ("6.2B", 64): (0.1091, 0.0554, 0.0294, 0.0554, 0.001),
}


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the number of closed forms and published bubbles that differ, per schedule."""
    rows = {name: forms(k, 4 if quick else 8) for name, k in KNOWN_SCHEDULES.items()}
    bubbles = {f"{model}, m = {m}": published(model, m) for model, m in PROFILED}
    off = max(abs(row["published"] - row["ours"]) for found in bubbles.values() for row in found.values())
    wrong = sum(len(row["wrong"]) for row in rows.values())
    return {
        "name": "closed_forms",
        "value": wrong,
        "goal": f"no form of p <= 8, m <= 4p, v <= 4 fails; published bubbles within {CLOSE_BUBBLE}",
        "ok": wrong == 0 and off <= CLOSE_BUBBLE,
        "rival": None,
        "details": {
            "forms checked": sum(row["checked"] for row in rows.values()),
            "largest difference from a published bubble": round(off, 6),
            "schedules": rows,
            "bubbles": bubbles,
        },
    }


def shapes(k: KnownSchedule, most: int) -> Iterator[ScheduleSizes]:
    for p in range(2, most + 1):
        for m in range(1, 4 * p + 1):
            for v in range(1, 5) if k.takes_chunks else (1,):
                yield ScheduleSizes(p, m, v)


def forms(k: KnownSchedule, most: int) -> dict[str, Any]:
    """Return how many tables were made and checked, how many forms hold, and which do not."""
    made = checked = 0
    wrong: list[str] = []
    for shape in shapes(k, most):
        try:
            schedule = k.build(shape.p, shape.m, shape.v)
        except ScheduleError:
            continue
        made += 1
        peaks = check_schedule(schedule, stale=True)
        if k.holds(shape):
            found = differences(k, schedule, shape, peaks)
            checked += len(found)
            wrong += [f"{name} at p={shape.p} m={shape.m} v={shape.v}" for name, d in found.items() if abs(d) > CLOSE]
    return {"tables": made, "checked": checked, "wrong": wrong}


def differences(
    k: KnownSchedule, schedule: Schedule, shape: ScheduleSizes, peaks: tuple[float, ...]
) -> dict[str, float]:
    """Return the simulated values less the values of the closed forms."""
    parts = max(way.count(rank) for way in schedule.ways for rank in range(schedule.ranks))
    line = simulate_schedule(schedule, Times(1 / parts, 1 / parts, 1 / parts))
    found = {
        "makespan": (line.makespan - shape.work, k.bubble),
        "span": (line.span - shape.work, k.span_bubble),
        "peak": (max(peaks) / parts, k.peak),
    }
    return {name: value - form(shape) for name, (value, form) in found.items() if form is not None}


def published(model: str, m: int) -> dict[str, dict[str, float]]:
    """Return the bubbles of one column of the table, published and ours."""
    f, b, w, message = PROFILED[model, m]
    times = Times(f, b, w, transfer=message)
    found: dict[str, dict[str, float]] = {}
    for name, bubble in zip(PUBLISHED_SCHEDULES, PUBLISHED[model, m], strict=True):
        make = schedule_by_name(name).make
        schedule = make(8, m, times) if name in ("ZB-1p", "ZB-2p") else make(8, m)
        found[name] = {"published": bubble, "ours": round(simulate_schedule(schedule, times).span_bubble, 5)}
    return found
