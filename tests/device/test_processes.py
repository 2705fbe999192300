"""Processes whose tensors are on devices: bits, calls, and collectives beside operators, in virtual time.

Autograd has a thread for each device there, as on a GPU.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import meshwright as mw
from benchmarks._virtual_steps import VirtualStep, virtual_step
from meshwright.comm import launch
from tests.device import _overlap_program as overlapped
from tests.device import _process_program as program
from tests.device.build import build
from tests.device.inspection import Devices

pytestmark = pytest.mark.usefixtures("forked_processes")


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


def test_collectives_run_beside_operators(
    mesh_device: Devices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of processes takes the virtual time of simulated ranks, with their losses, and each wait is needed."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=":")
    assert launch([overlapped.__file__, str(tmp_path)], 2, timeout=100) == 0
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert all(rank["races"] == 0 < rank["missed"] for rank in ranks)
    for name in overlapped.STEPS:
        expected = overlapped.step_of(name, lambda strategy: _simulated(mesh_device, strategy))
        seconds, hidden, losses = max(rank["steps"][name] for rank in ranks)
        assert hidden > 0
        copies = len(expected.collectives) * overlapped.MACHINE.kernel  # c10d reduces in place, so in a copy
        assert -1e-9 < seconds - expected.seconds < copies + 1e-9
        assert tuple(losses) == expected.losses


def _simulated(devices: Devices, strategy: mw.Strategy | None) -> VirtualStep:
    return virtual_step(devices, overlapped.MACHINE, overlapped.CHAIN, strategy, ranks=2)
