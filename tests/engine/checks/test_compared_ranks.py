"""Programs on simulated ranks whose calls are compared as between processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshwright as mw
from tests.compared_ranks import compared
from tests.pipeline.test_autocast import llama, stepped
from tests.pipeline.test_layers import CASES, piped


@pytest.mark.parametrize(("names", "mode", "way", "microbatches", "replicas", "strategy"), CASES)
def test_static_pipelines(
    names: tuple[str, ...],
    mode: str,
    way: tuple[int, ...],
    microbatches: int,
    replicas: int,
    strategy: dict[str, Any],
) -> None:
    def program() -> list[Any]:
        return piped(names, mode, way, microbatches, replicas, **strategy)

    ranks = replicas * (max(way) + 1)
    expected = mw.simulate(program, ranks)
    with compared():
        found = mw.simulate(program, ranks)
    assert [losses for losses, *_ in found] == [losses for losses, *_ in expected]


def test_eager_pipelines_under_autocast() -> None:
    with compared():
        mw.simulate(lambda: stepped(llama((2, 2, 1)), torch.bfloat16), 4)
