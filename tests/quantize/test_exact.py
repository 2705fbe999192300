"""The law of quantization: codes, scales and zero points on any mesh equal those of one device, bit by bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.comm import current_communicator

from .models import MESHES, SCHEMES, batches, differences, perceptron, quantized_on, state_of


@pytest.mark.parametrize("mesh", MESHES)
def test_codes_on_a_mesh_are_those_of_one_device(mesh: str) -> None:
    ones = {name: mw.quantize(perceptron(), scheme) for name, scheme in SCHEMES.items()}
    for rank in quantized_on(MESHES[mesh], perceptron, SCHEMES):
        for name, one in ones.items():
            state, values = rank[name]
            assert differences(state_of(one), state) == [], name
            torch.testing.assert_close(values, one(batches(1)[0]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_values_are_near_those_of_the_model(scheme: str) -> None:
    x = batches(1)[0]
    values = perceptron()(x)
    error = (mw.quantize(perceptron(), SCHEMES[scheme])(x) - values).norm() / values.norm()
    most = {8: 0.1, 4: 0.3, 3: 0.5}[SCHEMES[scheme].weights.num_bits]
    assert 0 < error < most


def test_no_weight_is_gathered_if_shards_have_whole_groups() -> None:
    def received() -> int:
        model = MESHES["dp 2 x tp 2"].marked(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
        before = current_communicator().seen.total_received
        mw.quantize(model, SCHEMES["w4a16"])
        return current_communicator().seen.total_received - before

    assert max(mw.simulate(received, 4)) < 200
