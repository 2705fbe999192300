"""Pipelines with tensors on a device: the bits of the same pipelines on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshwright as mw
from tests.device.inspection import Devices
from tests.pipeline.oracle import piped

WAYS: dict[str, tuple[int, ...]] = {
    "1F1B": (0, 1),
    "Interleaved 1F1B": (0, 1, 0, 1),
    "ZB-H1": (0, 1),
    "ZB-V": (0, 1, 1, 0),
}


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("schedule", WAYS)
def test_bits_are_those_on_the_cpu(mesh_device: Devices, schedule: str, dropout: float) -> None:
    def trained(device: str) -> list[Any]:
        options = {"accumulate_steps": 4, "schedule_mode": schedule}
        return piped(WAYS[schedule], options, 8, device=device, dropout=dropout)

    for found, expected in zip(mw.simulate(trained, 2, "mesh:0"), mw.simulate(trained, 2, "cpu"), strict=True):
        assert found[0] == expected[0]
        assert found[1].keys() == expected[1].keys()
        assert all(torch.equal(found[1][name], expected[1][name]) for name in expected[1])
