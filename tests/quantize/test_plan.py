"""Plans know the bytes of quantized weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.quantize import Scheme, outline


@pytest.mark.parametrize("scheme", ["int8", "w4a16", "mxfp4"])
def test_a_quantized_weight_has_its_stored_bytes_and_no_states(scheme: str) -> None:
    chosen = Scheme.preset(scheme, targets=("0",))
    model = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 8, bias=False))
    weight = outline(model, chosen).layers["0"][1]
    quantized = mw.quantize(model, chosen)
    batch = [torch.ones(1, 1024), torch.ones(1, 8)]
    plan = mw.plan(quantized, batch, nn.functional.mse_loss, cluster="1xH100")[0]
    trained = 5 * 4 * 8 * 1024  # the parameter, its gradient, Adam's states and an update
    assert plan.nbytes == pytest.approx(trained + weight, rel=0.02)


def test_a_frozen_parameter_has_no_gradient_and_no_states() -> None:
    model = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 8, bias=False))
    batch = [torch.ones(1, 1024), torch.ones(1, 8)]

    def planned() -> tuple[float, float]:
        plan = mw.plan(model, batch, nn.functional.mse_loss, cluster="1xH100")[0]
        return plan.nbytes, plan.seconds

    trained, large = 5 * 4 * 8 * 1024, 4 * 1024 * 1024
    all_bytes, all_seconds = planned()
    model[0].requires_grad_(False)
    nbytes, seconds = planned()
    assert all_bytes == pytest.approx(trained + 5 * large, rel=0.02)
    assert nbytes == pytest.approx(trained + large, rel=0.02)
    assert seconds < all_seconds
