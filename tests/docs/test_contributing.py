"""The tutorial of CONTRIBUTING.md works: its change is possible and has the described effect."""

from __future__ import annotations

import warnings

import pytest
from torch import Tensor

from meshwright.spmd.rules.rule_table import RULES
from tests.spmd.samples import build
from tests.spmd.walker import check

from .pages import ROOT, blocks, run

PAGE = ROOT / "CONTRIBUTING.md"
OPERATOR = "aten.multi_margin_loss"


def blocks_of_the_page(start: str) -> list[str]:
    """Return the blocks of the page that begin with `start`."""
    return [block.text.strip() for block in blocks(PAGE) if block.text.strip().startswith(start)]


def test_the_operator_runs_on_whole_tensors() -> None:
    assert OPERATOR not in RULES, "CONTRIBUTING.md keeps it for who comes next: choose another operator there"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, printed, shown = next(run(PAGE))
    assert printed == shown


def test_the_line_is_wrong_and_the_function_right(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = blocks_of_the_page(f'"{OPERATOR}"')
    (samples,) = blocks_of_the_page("multi_margin_loss:")
    (source,) = blocks_of_the_page("def margin_rule")
    names = {"Tensor": Tensor}
    exec(source, names)
    calls = [build(*text.split(": ", 1)) for text in samples.splitlines()]

    monkeypatch.setitem(RULES, OPERATOR, line.split(": ")[1].strip('",'))
    assert check(calls[0], 3) > 0
    with pytest.raises(AssertionError, match="argument 2 is shorter than argument 1"):
        check(calls[1], 2)

    monkeypatch.setitem(RULES, OPERATOR, names["margin_rule"])
    for ranks in (2, 3):
        assert [check(call, ranks) > 0 for call in calls] == [True, False], "rows are cut, and a mean has no cut"
