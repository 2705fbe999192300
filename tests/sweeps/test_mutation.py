"""The right mutants are made, the sample is stable, and the table of equivalent mutants is up to date."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import mutation
from benchmarks._mutants import Mutant, sample

SOURCE = '''\
"""A docstring with 1 number."""

from __future__ import annotations

import os

Range = tuple[int, int]


def total(xs: list[int] | None, size: int) -> int:
    """Return 2 things."""
    if size < 0:
        raise ValueError("negative", size + 1)
    return sum(zip(xs, [size], strict=True)) + size


class Named:
    __slots__ = ("name",)

    def __repr__(self) -> str:
        return "text" + self.name
'''


def mutants(root: Path, source: str) -> list[Mutant]:
    folder = root / "src" / "meshwright" / "layout"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "_a.py").write_text(source)
    (folder / "__init__.py").write_text("x = 1\n")
    return sample(root, ["layout"], 1000, 0)


def test_one_mutant_for_each_node_that_counts(tmp_path: Path) -> None:
    found = mutants(tmp_path, SOURCE)
    befores = sorted((m.line, m.before) for m in found)
    assert [line for line, _ in befores] == [12, 12, 14, 14, 14, 21]
    assert all(m.code != SOURCE for m in found)
    assert not any("strict=None" in m.code or "strict=False" in m.code for m in found)
    assert {m.diff for m in found if m.line == 21} == {'- return "text" + self.name\n+ return "text" - self.name'}


def test_the_sample_does_not_change_with_other_lines(tmp_path: Path) -> None:
    before = [(m.before, m.after, m.key) for m in mutants(tmp_path, SOURCE)]
    after = mutants(tmp_path, SOURCE.replace("import os\n", "import os\n\nMOST = 5\n"))
    new = [m for m in after if "MOST" in m.before]
    assert new
    assert [(m.before, m.after, m.key) for m in after if m not in new] == before


def test_a_seed_orders_the_mutants(tmp_path: Path) -> None:
    mutants(tmp_path, SOURCE)
    orders = [[m.line for m in sample(tmp_path, ["layout"], 6, seed)] for seed in range(5)]
    assert len({tuple(order) for order in orders}) > 1


def test_results_are_kept_for_one_state_of_the_source(tmp_path: Path) -> None:
    first, second, *_ = mutants(tmp_path, SOURCE)
    kept = mutation.Kept(tmp_path / "results.json")
    kept.keep(first, {"killer": "test_a", "seconds": 1.0, "state": "now"})
    again = mutation.Kept(tmp_path / "results.json")
    assert again.verdict(first, "now") == {"file": first.file, "killer": "test_a", "seconds": 1.0, "state": "now"}
    assert again.verdict(first, "later") is None
    assert again.verdict(second, "now") is None
    assert again.likely_killers(second) == ["test_a"]


@pytest.mark.parametrize("entry", list(mutation.reasons()), ids=lambda entry: f"{entry[0]}: {entry[1][:40]}")
def test_an_equivalent_mutant_belongs_to_an_existing_line(entry: tuple[str, str, str]) -> None:
    file, line, becomes = entry
    source = [text.strip() for text in (mutation.ROOT / file).read_text().splitlines()]
    assert all(text in source for text in line.splitlines())
    assert becomes != line
    assert len(mutation.reasons()[entry]) > 20
