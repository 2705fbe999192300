"""Ranks that run other static steps get an error before a parameter changes, with kernels and in pipelines too."""

from __future__ import annotations

from typing import Any

import pytest

KINDS = ("kernels", "1F1B", "PipeDream with kernels")
CASES = {
    "other_rate": "lr of group 0 of SGD is 0.1 on rank 0 and 0.2 on rank 1",
    "other_batch": "checksum of input 0 of the program",
    "one_step_more": "train of Sequential",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_another_step_on_one_rank_is_an_error_before_the_update(
    two: list[dict[str, Any]], kind: str, case: str
) -> None:
    for found in two:
        assert CASES[case] in found[f"{kind}: {case}"]["error"]
        assert found[f"{kind}: {case}"]["is as before"]
