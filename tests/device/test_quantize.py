"""Quantized models on devices: the outputs of one device on the CPU, also where ranks share the calibration."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.quantize import Scheme
from tests.device.inspection import Devices


def outputs(preset: str, device: str) -> Tensor:
    """Return the outputs of a quantized model on this rank of a tensor-parallel mesh."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).to(device)
    x = torch.randn(16, 32).to(device)
    plan = {"0": mw.ColwiseParallel(), "2": mw.RowwiseParallel()}
    model, _ = mw.parallelize(model, None, mw.ProcessMesh([0, 1], ["tp"]), mw.Parallelism(plan))
    scheme = Scheme.preset(preset, group_size=32) if preset.startswith("w4") else Scheme.preset(preset)
    model = mw.quantize(model, scheme, [(x,)] if "-" in preset else None)
    with torch.no_grad():
        return mw.unshard_dtensor(model(x)).cpu()


@pytest.mark.parametrize("preset", ["int8", "w4a16-gptq", "w4a16-awq", "w8a8-smoothquant"])
def test_outputs_are_those_on_the_cpu(mesh_device: Devices, preset: str) -> None:
    expected, found = (mw.simulate(outputs, 2, preset, device)[0] for device in ("cpu", "mesh:0"))
    torch.testing.assert_close(found, expected)
