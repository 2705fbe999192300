"""Training step over the same transport on both sides: time divided by torch's and by a program's by hand.

The cases of `versus_torch` and `static_speed`, without shared memory: Gloo carries the collectives of all contenders.
All checks of ours are on. Contenders take turns in the same processes, in blocks of a few steps. A ratio is the median,
over the turns, of the ratio of two blocks of one turn. The details have the collectives and bytes that each contender
gives Gloo in one step, from torch's own trace.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import static_speed, versus_torch
from benchmarks._transports import GLOO

GOAL = 1.0
PAIRS = {"torch": versus_torch.PAIRS, "by hand": (("ours", "by hand"),)}
"""The pairs of contenders whose times and calls are compared, by rival."""
QUICK = "overhead"
"""The size of the quick version."""
Rows = Mapping[str, Mapping[str, Any]]
"""The rows of cases, by the name of the case."""


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the worst ratio of our time to that of each rival."""
    rows = measured(quick)
    value = {f"ours / {rival}": worst_ratio(rows[rival], PAIRS[rival]) for rival in PAIRS}
    calls = {f"ours / {rival}": worst_calls(rows[rival], PAIRS[rival]) for rival in PAIRS}
    right = all(map(versus_torch.is_right, rows["torch"].values())) and all(
        map(static_speed.agree, rows["by hand"].values())
    )
    return {
        "name": "same_transport",
        "value": value,
        "goal": f"at most {GOAL} in every case; the collectives beside those of the rival have no goal",
        "ok": right and static_speed.reached(value, GOAL),
        "rival": {"collectives": calls},
        "details": {"unit": "ms per step, one thread a process", "cases": rows},
    }


def measured(quick: bool) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the rows by rival and case."""
    beside_torch = versus_torch.over(GLOO, versus_torch.CASES)
    by_hand = static_speed.over(GLOO, static_speed.CASES)
    sizes = static_speed.SIZES

    def chosen(size: str) -> bool:
        return not quick or size == QUICK

    return {
        "torch": {
            str(case): versus_torch.measure(case, static_speed.turns(sizes[case.size], quick))
            for case in beside_torch
            if chosen(case.size)
        },
        "by hand": {
            str(case): static_speed.measure(case, static_speed.turns(sizes[case.size], quick))
            for case in by_hand
            if chosen(case.size)
        },
    }


def worst_ratio(rows: Rows, pairs: Sequence[tuple[str, str]]) -> float | None:
    """Return the largest ratio of times; None if a case has none."""
    names = [f"{mine} / {other}" for mine, other in pairs]
    found = [ratio for row in rows.values() for name in names if (ratio := row.get("ratios", {}).get(name)) is not None]
    return max(found) if found and all("ratios" in row for row in rows.values()) else None


def worst_calls(rows: Rows, pairs: Sequence[tuple[str, str]]) -> float | None:
    """Return the largest ratio of the numbers of collectives in a step; None if no case has one."""
    found = [
        round(row["gloo"][mine]["calls"] / row["gloo"][other]["calls"], 3)
        for row in rows.values()
        for mine, other in pairs
        if "gloo" in row and mine in row["gloo"] and row["gloo"].get(other, {}).get("calls")
    ]
    return max(found, default=None)


if __name__ == "__main__":
    print(json.dumps(run()))
