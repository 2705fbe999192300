"""Gradients of pipelines are checked before the update: all stages stop or skip it together."""

from __future__ import annotations

from typing import Any

import pytest

CASES = ["1F1B SGD", "1F1B momentum", "1F1B AdamW", "1F1B Adafactor", "ZB-H1 AdamW"]


@pytest.mark.parametrize("case", CASES)
def test_bad_gradients_stop_the_update_and_good_ones_are_used(two: list[dict[str, Any]], case: str) -> None:
    for found in two:
        assert found[case]["left out"]
        assert found[case]["stopped"]
        assert "the gradient of 0.weight has non-finite numbers" in found[case]["error"]
        assert found[case]["losses"] == pytest.approx(found[case]["right"], rel=1e-5)
