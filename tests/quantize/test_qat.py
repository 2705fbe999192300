"""Quantization-aware training: the rounded numbers are those that `mw.quantize` stores, on every mesh."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import meshwright as mw
from meshwright.quantize import FakeQuantizedLinear, NumberFormat, QuantizeError, Scheme
from meshwright.quantize.training.fake_quantization import fake_quantized

from .models import MESHES, SCHEMES, Mesh, batches, differences, perceptron, state_of

INT3 = SCHEMES["int3"]
LABELS = torch.linspace(-1, 1, 40)


def trained(model: Any, steps: int = 3) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for x in batches(steps):
        out = model(x)
        F.mse_loss(out, LABELS.expand(out.shape)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_prepared_model_computes_with_the_numbers_of_the_quantized_one(scheme: str) -> None:
    model = trained(mw.prepare_qat(perceptron(), SCHEMES[scheme]))
    x = batches(1)[0]
    with torch.no_grad():
        found = model(x)
        torch.testing.assert_close(found, mw.quantize(model, SCHEMES[scheme])(x), rtol=1e-5, atol=1e-6)


def test_the_gradient_ignores_the_rounding() -> None:
    layer: Any = mw.prepare_qat(nn.Linear(64, 48), INT3)
    rounded = fake_quantized(layer.weight.detach(), INT3.weights)
    assert not torch.equal(rounded, layer.weight)
    x, grad = batches(1)[0].requires_grad_(), torch.randn(3, 48)
    layer(x).backward(grad)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, grad @ rounded)
    torch.testing.assert_close(layer.weight.grad, grad.t() @ x.detach())


@pytest.mark.parametrize("mesh", ["tp 2", "columns, uneven", "ZeRO-3 x tp"])
def test_training_on_a_mesh_leads_to_the_codes_of_one_device(mesh: str) -> None:
    schemes = {name: SCHEMES[name] for name in ("int3", "int8-dynamic", "int4, asymmetric")}

    def codes(on: Mesh | None, scheme: Scheme) -> dict[str, Tensor]:
        model = perceptron() if on is None else on.marked(perceptron())
        with mw.same_numbers():
            trained(mw.prepare_qat(model, scheme))
        return state_of(mw.quantize(model, scheme))

    def program() -> dict[str, dict[str, Tensor]]:
        return {name: codes(MESHES[mesh], scheme) for name, scheme in schemes.items()}

    expected = {name: codes(None, scheme) for name, scheme in schemes.items()}
    for rank in mw.simulate(program, MESHES[mesh].ranks):
        assert [each for name in schemes for each in differences(expected[name], rank[name])] == []


def test_a_static_step_and_a_compiled_model_train_alike() -> None:
    x = batches(1)[0]

    def program() -> None:
        eager, static = (mw.prepare_qat(MESHES["tp 2"].marked(perceptron()), INT3) for _ in range(2))
        optimizer = torch.optim.SGD(static.parameters(), lr=0.1)
        labels = LABELS.expand(3, 40)
        loss = mw.to_static(static, loss=F.mse_loss, optimizer=optimizer)(x, labels)
        expected = F.mse_loss(eager(x), labels)
        expected.backward()
        torch.optim.SGD(eager.parameters(), lr=0.1).step()
        torch.testing.assert_close(mw.unshard_dtensor(loss), mw.unshard_dtensor(expected))
        with torch.no_grad():
            for one, other in zip(static.parameters(), eager.parameters(), strict=True):
                torch.testing.assert_close(mw.unshard_dtensor(one), mw.unshard_dtensor(other))

    mw.simulate(program, 2)
    model = mw.prepare_qat(perceptron(), INT3)
    torch.compiler.reset()
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)


def test_a_parametrized_layer_keeps_its_parametrization() -> None:
    model: Any = mw.prepare_qat(nn.Sequential(weight_norm(nn.Linear(64, 40))), INT3)
    assert isinstance(model[0], FakeQuantizedLinear)
    trained(model)
    x = batches(1)[0]
    torch.testing.assert_close(model(x), F.linear(x, fake_quantized(model[0].weight, INT3.weights), model[0].bias))
    assert copy.deepcopy(model)(x).equal(model(x))


def test_bad_requests_are_refused() -> None:
    with pytest.raises(QuantizeError, match="needs calibration data"):
        mw.prepare_qat(perceptron(), "fp8")
    with pytest.raises(QuantizeError, match="float8 tensorwise"):
        mw.prepare_qat(mw.convert_to_float8_training(perceptron()), INT3)
    model: Any = mw.prepare_qat(perceptron(), INT3)
    assert all(isinstance(model[at], FakeQuantizedLinear) for at in (0, 2, 4))
    with pytest.raises(QuantizeError, match="trained for weights int3"):
        mw.quantize(model, "int8")
    other_method = Scheme(NumberFormat(3, strategy="group", group_size=16), method="gptq")
    mw.quantize(model, other_method, batches())
