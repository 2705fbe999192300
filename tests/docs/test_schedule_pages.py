"""The page of all schedules and its pictures equal the output of `make pictures`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

import schedule_pages

FILES = schedule_pages.files()
OTHERS = {schedule_pages.PICTURES / name for name in ("one-program.svg", "overlap.svg")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_page_is_current(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == FILES[path], "make pictures writes it anew"


def test_there_are_no_other_pictures() -> None:
    assert {*schedule_pages.PICTURES.glob("*.svg")} == OTHERS | {path for path in FILES if path.suffix == ".svg"}
