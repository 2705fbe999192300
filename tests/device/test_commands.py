"""Commands that name and measure devices work with any accelerator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.cli.commands import doctor
from meshwright.cli.ranks import measure
from meshwright.comm import current_communicator


def test_a_device_is_measured(mesh_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "ON_ACCELERATORS", measure.Sizes((8, 16), 1024))
    monkeypatch.setattr(measure, "MESSAGES", (4, 64))
    device = torch.device("mesh", 0)
    found = mw.simulate(lambda: measure.measure(current_communicator(), 0.001, device), 2)[0]
    assert found["name"] == "mesh"
    assert set(found["device"]["flops"]) == {"f32", "f16", "bf16"}
    assert found["device"]["memory"] > 0


def test_devices_are_listed(mesh_device: Any) -> None:
    assert doctor._devices().found.endswith("mesh:0; mesh:1; mesh:2; mesh:3")
