"""The tables of figures agree with the stored results."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.figures import SHOWN, pages, stored
from benchmarks.platforms import latest, row_of_report, table

MOST_IN_THE_README = 8
PAGES = pages(stored())


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_table_is_current(path: Path) -> None:
    assert path.read_text() == PAGES[path], "run `python -m benchmarks.figures --tables`"


def test_the_readme_has_few_figures() -> None:
    assert len(SHOWN) <= MOST_IN_THE_README
    assert set(SHOWN) <= set(stored())


def test_platforms_show_their_latest_results_or_never_run() -> None:
    machine = {"device": "xpu", "name": "X1", "count": 2, "torch": "2.14", "python": "3.12", "through_host": False}
    results = [{"level": 0, "name": "a", "state": "ok"}, {"level": 1, "name": "b", "state": "HUNG"}]
    reports = [
        {"machine": machine, "on": on, "results": results, "counts": {"ok": 1, "HUNG": 1}}
        for on in ("2026-11-02", "2026-11-01")
    ]
    rows = latest(map(row_of_report, reports))
    lines = table(rows).splitlines()
    assert (
        "| Intel GPUs (`xpu`) | X1, 2 devices | 2026-11-02 | torch 2.14, Python 3.12 | levels 0 to 1 "
        "| 1 of 2 ok, 1 failed (b) |"
    ) in lines
    assert "| Apple GPUs (`mps`) | never run | | | | |" in lines
    assert len(rows) == 1
