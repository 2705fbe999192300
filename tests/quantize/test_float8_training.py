"""Float8 training: products of both passes from float8 numbers, on one device and on any mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import meshwright as mw
from meshwright.comm import current_communicator
from meshwright.quantize import Float8Linear, QuantizeError
from meshwright.quantize.training import float8_products

from .models import MESHES, Mesh, batches, differences, perceptron, state_of

RECIPES = "tensorwise", "rowwise"
PAIR = mw.ProcessMesh([0, 1], ["a"])
ROWS, COLUMNS, WHOLE = mw.Shard(0), mw.Shard(1), mw.Replicate()
PLACEMENTS = {
    "dp": (ROWS, WHOLE),
    "tp by columns": (WHOLE, ROWS),
    "tp by rows": (COLUMNS, COLUMNS),
    "ZeRO-3": (ROWS, ROWS),
    "ZeRO-3 by the other dim": (ROWS, COLUMNS),
}
"""Name → the placements of the inputs and of the weight."""


def numbers() -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs, a weight and gradients of the results, with rows of very different sizes."""
    generator = torch.Generator().manual_seed(0)
    x, w, grad = (torch.randn(s, generator=generator) for s in ((32, 64), (48, 64), (32, 48)))
    return x * torch.logspace(-2, 1, 32).unsqueeze(1), w, grad


def passes(layer: Any, x: Tensor, grad: Tensor) -> list[Tensor]:
    """Return the result of a layer, and the gradients of its input and weight, whole."""
    x.requires_grad_()
    y = layer(x)
    y.backward(grad)
    assert x.grad is not None
    return [mw.unshard_dtensor(t.detach()) for t in (y, x.grad, layer.weight.grad)]


def linear(weight: Tensor, recipe: Any | None) -> Any:
    layer: Any = nn.Linear(64, 48, bias=False)
    layer.weight = nn.Parameter(weight.clone())
    return layer if recipe is None else mw.convert_to_float8_training(layer, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_are_near_the_exact_ones(recipe: str) -> None:
    x, w, grad = numbers()
    exact, found = (passes(linear(w, how), x.clone(), grad) for how in (None, recipe))
    for one, other in zip(exact, found, strict=True):
        assert 0 < (one - other).norm() < 0.06 * one.norm()


@pytest.mark.parametrize("placements", PLACEMENTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_on_a_mesh_has_the_numbers_of_one_device(recipe: str, placements: str) -> None:
    x, w, grad = numbers()
    expected = passes(linear(w, recipe), x.clone(), grad)
    of_x, of_w = PLACEMENTS[placements]

    def program() -> list[Tensor]:
        layer = linear(w, recipe)
        layer.weight = mw.shard_tensor(layer.weight, PAIR, [of_w])
        return passes(layer, mw.shard_tensor(x, PAIR, [of_x]), grad)

    for found in mw.simulate(program, 2):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_scale_over_a_sharded_dim_is_a_maximum_of_maxima() -> None:
    x, w, _ = numbers()

    def received() -> int:
        layer = linear(w, "rowwise")
        layer.weight = mw.shard_tensor(layer.weight, PAIR, [COLUMNS])
        sharded = mw.shard_tensor(x, PAIR, [COLUMNS])
        before = current_communicator().seen.total_received
        with torch.no_grad():
            layer(sharded)
        return current_communicator().seen.total_received - before

    result, half_of_inputs = 4 * 32 * 48, 4 * 32 * 32
    assert result < max(mw.simulate(received, 2)) < result + half_of_inputs // 4


@pytest.mark.parametrize("mesh", ["tp 2", "dp 2 x tp 2", "ZeRO-3 x tp"])
def test_training_in_a_fixed_order_has_the_bits_of_one_device(mesh: str) -> None:
    def state(on: Mesh | None, recipe: Any) -> dict[str, Tensor]:
        model = mw.convert_to_float8_training(perceptron(), recipe)
        model = model if on is None else on.marked(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for x in batches(2):
            with mw.same_numbers():
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return state_of(model)

    expected = {recipe: state(None, recipe) for recipe in RECIPES}
    for rank in mw.simulate(lambda: {r: state(MESHES[mesh], r) for r in RECIPES}, MESHES[mesh].ranks):
        assert [each for r in RECIPES for each in differences(expected[r], rank[r])] == []


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_has_the_numbers_of_the_emulation(
    recipe: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU has `_scaled_mm` too, though it is slower there than the emulation."""
    x, w, grad = (each.to(dtype) for each in numbers())
    emulated = passes(linear(w, recipe), x.clone(), grad)
    calls: list[Any] = []

    def by_kernel(*args: Any) -> Tensor:
        calls.append(args)
        return product(*args)

    product = float8_products._product_by_kernel
    monkeypatch.setattr(float8_products, "_has_kernel", lambda *_: True)
    monkeypatch.setattr(float8_products, "_product_by_kernel", by_kernel)
    by_the_kernel = passes(linear(w, recipe), x.clone(), grad)
    assert len(calls) == 3
    torch.testing.assert_close(by_the_kernel, emulated)


def loss_of(model: Any, x: Tensor) -> Tensor:
    return F.mse_loss(model(x), torch.linspace(-1, 1, 40).expand(3, 40))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch.compile instantiates functions
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_static_step_and_a_compiled_model_train_alike(recipe: Any) -> None:
    x, labels = batches(1)[0], torch.linspace(-1, 1, 40).expand(3, 40)

    def program() -> None:
        eager, static = (MESHES["tp 2"].marked(mw.convert_to_float8_training(perceptron(), recipe)) for _ in range(2))
        mw.to_static(static, loss=F.mse_loss, optimizer=torch.optim.SGD(static.parameters(), lr=0.1))(x, labels)
        loss_of(eager, x).backward()
        torch.optim.SGD(eager.parameters(), lr=0.1).step()
        with torch.no_grad():
            for one, other in zip(static.parameters(), eager.parameters(), strict=True):
                torch.testing.assert_close(mw.unshard_dtensor(one), mw.unshard_dtensor(other))

    mw.simulate(program, 2)
    models = [mw.convert_to_float8_training(perceptron(), recipe) for _ in range(2)]
    torch.compiler.reset()
    compiled: Callable[..., Any] = torch.compile(models[1], backend="eager", fullgraph=True)
    for model, run in zip(models, (models[0], compiled), strict=True):
        F.mse_loss(run(x), labels).backward()
        assert all(p.grad is not None for p in model.parameters())
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_autocast_sets_the_dtype() -> None:
    model: Any = mw.convert_to_float8_training(nn.Linear(32, 16))
    with torch.autocast("cpu", torch.bfloat16):
        y = model(torch.ones(2, 4, 32))
    assert (y.dtype, y.shape) == (torch.bfloat16, (2, 4, 16))
    y.sum().backward()
    assert model.weight.grad.dtype == torch.float32
    assert model(torch.ones(32)).shape == (16,)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_without_rows_has_a_gradient_of_zeros(recipe: Any) -> None:
    """An expert without tokens makes such a call."""
    y, grad_x, grad_w = passes(linear(numbers()[1], recipe), torch.ones(0, 64), torch.ones(0, 48))
    assert (y.shape, grad_x.shape) == ((0, 48), (0, 64))
    assert not grad_w.any()


def test_a_second_derivative_is_an_error() -> None:
    layer, x = linear(numbers()[1], "rowwise"), torch.ones(2, 64, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.square().sum().backward()


def test_a_layer_on_the_meta_device_has_shapes() -> None:
    layer = mw.convert_to_float8_training(nn.Linear(32, 16, device="meta"))
    assert layer(torch.ones(2, 32, device="meta")).shape == (2, 16)


def test_a_parametrized_layer_keeps_its_parametrization() -> None:
    model: Any = mw.convert_to_float8_training(weight_norm(weight_norm(nn.Linear(64, 48)), "bias", 0))
    x, _, grad = numbers()
    exact = F.linear(x, model.weight, model.bias)
    y = model(x)
    y.backward(grad)
    assert 0 < (y - exact).norm() < 0.06 * exact.norm()
    assert model.parametrizations.weight.original0.grad.any()


def test_bad_requests_are_refused() -> None:
    with pytest.raises(QuantizeError, match="tensorwise"):
        mw.convert_to_float8_training(perceptron(), "blockwise")  # pyright: ignore[reportArgumentType]
    with pytest.raises(QuantizeError, match="no layer is left"):
        mw.convert_to_float8_training(nn.ReLU())


def test_layers_with_a_forward_of_their_own_and_ignored_layers_stay() -> None:
    layers = {name: nn.Linear(8, 8) for name in ("inner", "lm_head", "trained")}
    mw.prepare_qat(layers["trained"], "int8")
    mw.convert_to_float8_training(nn.ModuleDict(layers))
    assert [name for name, layer in layers.items() if isinstance(layer, Float8Linear)] == ["inner"]
