"""Quantized layers are ordinary modules: hooks, shared layers, ignored layers, dtypes, and layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.quantize import QuantizedLinear, QuantizeError, Scheme, outline

from .models import MESHES, SCHEMES, batches, perceptron


def test_hooks_stay() -> None:
    model = perceptron()
    seen: list[str] = []

    def note(*_: object) -> None:
        seen.append("before")

    model[0].register_forward_pre_hook(note)  # pyright: ignore[reportIndexIssue]
    mw.quantize(model, "int8")(batches(1)[0])
    assert seen == ["before"]


def test_backward_and_state_hooks_stay() -> None:
    layer = nn.Linear(8, 8)
    seen: list[Any] = []
    layer.register_full_backward_hook(lambda _, grads, __: seen.append(grads))
    layer.register_state_dict_post_hook(lambda _, state, *__: state.update(seen=True))
    x = torch.ones(2, 8, requires_grad=True)
    mw.quantize(layer, "int8")(x).sum().backward()
    torch.testing.assert_close(seen, [(x.grad,)], rtol=0, atol=0)
    assert layer.state_dict()["seen"]


def test_a_layer_in_two_places_stays_one() -> None:
    layer = nn.Linear(8, 8)
    model: Any = mw.quantize(nn.Sequential(layer, nn.ReLU(), layer), "int8")
    assert isinstance(model[0], QuantizedLinear)
    assert model[0] is model[2]


def test_tied_and_ignored_layers_stay() -> None:
    model: Any = nn.ModuleDict({"embed": nn.Embedding(8, 16), "tied": nn.Linear(16, 8), "lm_head": nn.Linear(16, 8)})
    model["inner"] = nn.Linear(16, 16)
    model["tied"].weight = model["embed"].weight
    mw.quantize(model, "int8")
    assert [name for name, m in model.named_modules() if isinstance(m, QuantizedLinear)] == ["inner"]


def test_a_single_layer_stays_the_same_module() -> None:
    layer: Any = nn.Linear(8, 8)
    assert mw.quantize(layer, "int8") is layer
    assert isinstance(layer, QuantizedLinear)
    assert "weight" not in dict(layer.named_parameters())


def test_patterns_choose_layers() -> None:
    model: Any = mw.quantize(perceptron(), Scheme.preset("int8", targets=("re:[02]$",), ignore=("2",)))
    assert [isinstance(m, QuantizedLinear) for m in model] == [True, False, False, False, False]


def test_half_precision() -> None:
    model = perceptron().bfloat16()
    x = batches(1)[0].bfloat16()
    values = model(x)
    for scheme in SCHEMES.values():
        found = mw.quantize(perceptron().bfloat16(), scheme)(x)
        assert found.dtype == torch.bfloat16
        assert (found - values).norm() < 0.5 * values.norm()


def test_stored_tensors_are_sharded_like_the_weight() -> None:
    def specs() -> dict[str, str]:
        model = mw.quantize(MESHES["tp 2"].marked(perceptron()), SCHEMES["int4, asymmetric"])
        return {name: repr(x.spec) for name, x in model.named_buffers() if isinstance(x, mw.DistTensor)}

    assert mw.simulate(specs, 2)[1] == {
        "0.weight_packed": "i32[48@tp, 8]",
        "0.weight_scale": "f32[48@tp, 4]",
        "0.weight_shape": "i64[2]",
        "0.weight_zero_point": "i32[6, 4]",
        "2.weight_packed": "i32[80, 6@tp]",
        "2.weight_scale": "f32[80, 3]",
        "2.weight_shape": "i64[2]",
        "2.weight_zero_point": "i32[10, 3]",
        "4.weight_packed": "i32[40@tp, 10]",
        "4.weight_scale": "f32[40@tp, 5]",
        "4.weight_shape": "i64[2]",
        "4.weight_zero_point": "i32[5, 5]",
    }


@pytest.mark.parametrize("scheme", SCHEMES)
def test_torch_compiles_a_quantized_model_into_one_graph(scheme: str) -> None:
    model = mw.quantize(perceptron(), SCHEMES[scheme])
    x = batches(1)[0]
    torch.compiler.reset()  # else the compilations of other tests count toward torch's limit
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)


def test_a_static_program_has_the_values_of_the_eager_mode() -> None:
    x = batches(1)[0]

    @torch.no_grad()
    def program() -> None:
        for name in ("int8-dynamic", "w4a16", "nf4"):
            model = mw.quantize(MESHES["tp 2"].marked(perceptron()), SCHEMES[name])
            found = mw.to_static(model)(x)
            torch.testing.assert_close(mw.unshard_dtensor(found), mw.unshard_dtensor(model(x)), rtol=0, atol=0)

    mw.simulate(program, 2)


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize("convert", [mw.quantize, mw.prepare_qat], ids=["quantize", "prepare_qat"])
def test_a_layer_with_a_forward_of_its_own_stays(convert: Any) -> None:
    model = convert(nn.Sequential(nn.Linear(8, 8), Doubled(8, 8)), "int8")
    assert type(model[0]) is not nn.Linear
    assert type(model[1]) is Doubled


ROUNDED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "int8": lambda model: mw.quantize(model, "int8"),
    "int8-dynamic": lambda model: mw.quantize(model, "int8-dynamic"),
    "fp8": lambda model: mw.quantize(model, "fp8", [torch.randn(2, 5, 64)]),
    "qat": lambda model: mw.prepare_qat(model, SCHEMES["int3"]),
    "float8 training": mw.convert_to_float8_training,
}


@pytest.mark.parametrize("kind", ROUNDED)
@torch.no_grad()
def test_an_encoder_layer_of_torch_rounds_in_evaluation_too(kind: str) -> None:
    """Its fused operator for evaluation reads the weights of its linear layers, and does not call them."""
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, dropout=0, batch_first=True), 2)
    model, x = ROUNDED[kind](model), torch.randn(2, 5, 64)
    torch.testing.assert_close(model.eval()(x), model.train()(x), rtol=1e-5, atol=1e-5)


def test_code_that_reads_the_weight_gets_numbers_or_an_error() -> None:
    layer: Any = mw.quantize(nn.Linear(64, 64).bfloat16(), "int8")
    assert layer.weight.dtype == torch.bfloat16
    torch.testing.assert_close(layer.weight, layer.dequantized(), rtol=0, atol=0)
    codes: Any = mw.quantize(nn.Linear(64, 64), "int8-dynamic")
    with pytest.raises(QuantizeError, match="leave this layer out"):
        codes(torch.randn(2, 64).to(codes.weight.dtype))


@pytest.mark.parametrize("scheme", ["int8-dynamic", "fp8-dynamic", "mxfp4-dynamic"])
def test_the_gradient_of_inputs_ignores_their_rounding(scheme: str) -> None:
    layer: Any = mw.quantize(nn.Linear(64, 48), scheme)
    x, grad = torch.randn(3, 64, requires_grad=True), torch.randn(3, 48)
    out = layer(x)
    out.backward(grad)
    torch.testing.assert_close(x.grad, grad @ layer.dequantized(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.detach(), layer(x.detach()), rtol=0, atol=0)


def test_a_plan_leaves_layers_that_are_quantized_before_it() -> None:
    def program() -> tuple[Tensor, bool]:
        model = mw.quantize(perceptron(), "int8")
        mw.parallelize(model, None, mw.ProcessMesh([0, 1], ["tp"]), mw.Parallelism({"0": mw.ColwiseParallel()}))
        return mw.unshard_dtensor(model(batches(1)[0])), "weight" in vars(model.get_submodule("0"))

    exact = mw.quantize(perceptron(), "int8")(batches(1)[0])
    for found, has_copy in mw.simulate(program, 2):
        torch.testing.assert_close(found, exact)
        assert not has_copy


def test_an_outline_names_experts_and_presets() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.ones(4, 8, 16))

    found = outline(nn.ModuleDict({"experts": Experts(), "gate": nn.Linear(8, 4)}), "int8")
    assert list(found.layers) == ["gate", "experts.up"]
    assert found.left_out == {}
