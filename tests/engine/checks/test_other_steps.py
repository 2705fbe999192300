"""Ranks that run other static steps get an error before a parameter changes, with kernels and in pipelines too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.comm import launch

SCRIPT = Path(__file__).with_name("_other_step_program.py")
KINDS = ("kernels", "1F1B", "PipeDream with kernels")
CASES = {
    "other_rate": "lr of group 0 of SGD is 0.1 on rank 0 and 0.2 on rank 1",
    "other_batch": "checksum of input 0 of the program",
    "one_step_more": "train of Sequential",
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("two")
    assert launch([str(SCRIPT), str(folder)], 2, timeout=100) == 0
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_another_step_on_one_rank_is_an_error_before_the_update(
    two: list[dict[str, Any]], kind: str, case: str
) -> None:
    for found in two:
        assert CASES[case] in found[f"{kind}: {case}"]["error"]
        assert found[f"{kind}: {case}"]["is as before"]
