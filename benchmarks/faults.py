"""Thirty faults and bad inputs, each on real processes: how many end as they should, and how soon every rank knows.

    python -m benchmarks faults                       every row
    python -m benchmarks.faults --row 3 --row 21      these rows, with their observations
    python -m benchmarks.faults --clean 5000          false alarms over 5,000 clean steps

A row passes if its condition holds. The docstring of its function states the condition. Row 25 is about
generation.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks._fault_runs import Verdict

MOST_SECONDS = 5.0
CLEAN_STEPS, CLEAN_STEPS_QUICK = 5000, 200
Row = Callable[[], Verdict]


def rows() -> dict[int, Row]:
    """Return every row by its number; each module `_faults_*` has some of them in `ROWS`."""
    modules = sorted(path.stem for path in Path(__file__).parent.glob("_faults_*.py"))
    found: dict[int, Row] = {}
    for module in modules:
        more: dict[int, Row] = importlib.import_module(f"benchmarks.{module}").ROWS
        assert not found.keys() & more.keys(), f"{module} has rows of another module"
        found |= more
    return dict(sorted(found.items()))


def judge(number: int, row: Row) -> dict[str, Any]:
    """Return the outcome of a row; an exception of the row itself is a failure."""
    begin = time.perf_counter()
    try:
        verdict = row()
    except Exception as error:
        verdict = Verdict(False, f"{type(error).__name__}: {error}")
    what = (row.__doc__ or "").splitlines()[0]
    took = round(time.perf_counter() - begin, 1)
    return {"row": number, "what": what, "passed": verdict.passed, "found": verdict.found, "s": verdict.seconds} | {
        "took_s": took
    }


def figure(found: Iterable[dict[str, Any]], alarms: int | None, steps: int) -> dict[str, Any]:
    """Return the figure: rows that passed, the median and worst time, and false alarms over clean steps."""
    results = list(found)
    times = [r["s"] for r in results if r["s"] is not None]
    passed = sum(r["passed"] for r in results)
    return {
        "name": "faults",
        "value": passed,
        "goal": f"all {len(rows())} rows, no false alarm over {CLEAN_STEPS} clean steps",
        "ok": passed == len(rows()) and alarms == 0 and steps >= CLEAN_STEPS,
        "rival": None,
        "details": {
            "median_s": statistics.median(times) if times else None,
            "worst_s": max(times, default=None),
            "false_alarms": alarms,
            "clean_steps": steps,
            "rows": results,
        },
    }


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure over all rows."""
    from benchmarks._clean_steps import false_alarms

    steps = CLEAN_STEPS_QUICK if quick else CLEAN_STEPS
    return figure([_judge_and_print(n, row) for n, row in rows().items()], false_alarms(steps), steps)


def _judge_and_print(number: int, row: Row) -> dict[str, Any]:
    found = judge(number, row)
    print(_line(found), file=sys.stderr, flush=True)
    return found


def _line(found: dict[str, Any]) -> str:
    word = "passed" if found["passed"] else "FAILED"
    seconds = "" if found["s"] is None else f"{found['s']:5.1f} s"
    return f"{found['row']:2} {word} {seconds:8} {found['what']}: {found['found']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", type=int, action="append", help="number of a row")
    parser.add_argument("--clean", type=int, default=0, help="number of clean steps")
    args = parser.parse_args()
    known = rows()
    results = [judge(n, known[n]) for n in args.row or ()]
    for result in results:
        print(_line(result))
    if args.clean:
        from benchmarks._clean_steps import false_alarms

        print(json.dumps({"clean_steps": args.clean, "false_alarms": false_alarms(args.clean)}))


if __name__ == "__main__":
    main()
