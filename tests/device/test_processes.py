"""Processes whose tensors are on devices: autograd has a thread for each device there, as on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.comm import launch
from tests.device import _process_program as program
from tests.device.build import build


@pytest.mark.parametrize("backend", [[], ["gloo"]], ids=["its own backend", "through the host"])
def test_bits_and_calls_are_those_on_the_cpu(
    backend: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deferred gradients and recordings are kept per thread, so backward passes must stay in theirs."""
    build()
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=":")
    assert launch([program.__file__, str(tmp_path), *backend], 2, timeout=100) == 0
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(found) == len(program.CASES) + len(program.PIPELINES)
        for equal, cpu_calls, calls in found.values():
            assert equal
            assert calls == cpu_calls
