"""Comparisons of queued calls that run later: they delay no rank, and no wrong parameter is written."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import _queued_calls_program as program

from meshwright.comm import launch
from meshwright.tensor.core.computation_numbers import _writes

pytestmark = pytest.mark.usefixtures("forked_processes")

SCRIPT = str(Path(program.__file__))


def test_a_rank_does_not_wait_for_its_peer_at_a_comparison(tmp_path: Path) -> None:
    assert launch([SCRIPT, str(tmp_path), "goes on"], 2, timeout=100) == 0


def test_a_rank_that_waits_for_its_device_is_ended_with_the_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch([SCRIPT, str(tmp_path), "waits elsewhere"], 2, timeout=100) == 1
    told = capfd.readouterr().err
    assert "rank 0 calls all_reduce(sum" in told
    assert "rank 1 calls all_reduce(max" in told


@pytest.fixture(scope="module")
def updates(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("updates")
    assert launch([SCRIPT, str(folder), "updates"], 2, timeout=100) == 0
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("case", [case.__name__ for case in program.CASES])
def test_no_result_of_a_mismatched_call_reaches_a_parameter(updates: list[dict[str, Any]], case: str) -> None:
    for found in updates:
        assert found[case]["error"].startswith("DisagreementError")
        assert found[case]["is as before"]


WRITE_NOTHING = {"record_stream", "retain_grad"}
"""Methods that write according to their schema, but change no element."""


def test_all_in_place_methods_are_known() -> None:
    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("aten::") and s.arguments]
    first = {s.name.removeprefix("aten::") for s in schemas if _is_written(s.arguments[0])}
    methods = [name for name in first - WRITE_NOTHING if hasattr(torch.Tensor, name)]
    assert [name for name in methods if not _writes(getattr(torch.Tensor, name))] == []
    assert len(methods) > 100
    assert _writes(torch.ops.aten.add_.Tensor)
    assert not _writes(torch.ops.aten.add.Tensor)
    assert not _writes(torch.add)


def _is_written(argument: Any) -> bool:
    return str(argument.type) == "Tensor" and argument.alias_info is not None and argument.alias_info.is_write
