"""The tables of figures agree with the stored results."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.figures import SHOWN, pages, stored

MOST_IN_THE_README = 8
PAGES = pages(stored())


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_table_is_current(path: Path) -> None:
    assert path.read_text() == PAGES[path], "run `python -m benchmarks.figures --tables`"


def test_the_readme_has_few_figures() -> None:
    assert len(SHOWN) <= MOST_IN_THE_README
    assert set(SHOWN) <= set(stored())
