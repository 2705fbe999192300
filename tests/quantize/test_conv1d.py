"""Layers of the class Conv1D of transformers are quantized as linear layers with the transposed weight."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import meshwright as mw
from meshwright.quantize import CalibrationError, QuantizeError, Scheme, outline

from .models import INT4, MESHES, SCHEMES, Mesh, batches, differences, perceptron, state_of

CALIBRATED = {
    "gptq": Scheme(INT4, method="gptq", act_order=True),
    "awq": Scheme(INT4, method="awq"),
    "smoothquant": Scheme.preset("w8a8-smoothquant"),
    "fp8": Scheme.preset("fp8"),
}
EVERY = {**SCHEMES, **CALIBRATED, "nvfp4": Scheme.preset("nvfp4"), "mxfp4": Scheme.preset("mxfp4")}


class Block(nn.Module):
    """A norm and two layers, with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), Conv1D(96, 64), Conv1D(64, 96)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def transposed() -> nn.Module:
    """Return the perceptron with layers of the class Conv1D; one of its linear layers stays."""
    model = perceptron()
    for at in (0, 4):
        linear: Any = model.get_submodule(str(at))
        layer = Conv1D(linear.out_features, linear.in_features)
        layer.weight, layer.bias = nn.Parameter(linear.weight.t().contiguous()), linear.bias
        model.register_module(str(at), layer)
    return model


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def linear_twin(model: nn.Module) -> nn.Module:
    """Replace the Conv1D layers of a model by linear layers with the transposed weight, and return the model."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            layer = nn.Linear(module.nx, module.nf)
            layer.weight, layer.bias = nn.Parameter(module.weight.detach().t().contiguous()), module.bias
            model.set_submodule(name, layer)
    return model


def marked(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Return the model with its layers in turns parallel by columns and by rows."""
    layers: list[nn.Module] = [m for m in model.modules() if isinstance(m, (nn.Linear, Conv1D))]
    return mw.shard_layer(model, mesh.mesh(), partial(_mark, layers, mesh))


def _mark(layers: list[nn.Module], given: Mesh, _: str, layer: nn.Module, mesh: mw.ProcessMesh) -> None:
    if layer in layers:
        placements = given.rows if layers.index(layer) % 2 else given.columns
        if isinstance(layer, Conv1D):
            placements = [mw.Shard(1 - p.dim) if isinstance(p, mw.Shard) else p for p in placements]
        layer._parameters["weight"] = mw.shard_tensor(layer.weight, mesh, placements)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("scheme", EVERY)
def test_codes_and_values_are_those_of_linear_layers(scheme: str) -> None:
    x = batches(1)[0]
    for make in (blocks,) if scheme == "mxfp4" else (transposed, blocks):  # it has groups of 32, and that rows of 48
        one = mw.quantize(linear_twin(make()), EVERY[scheme], batches())
        other = mw.quantize(make(), EVERY[scheme], batches())
        assert differences(state_of(one), state_of(other)) == []
        assert torch.equal(one(x), other(x))


@pytest.mark.parametrize("mesh", ["tp 2", "rows, uneven", "ZeRO-3 x tp", "one dim twice"])
def test_codes_on_a_mesh_are_those_of_one_device(mesh: str) -> None:
    x = batches(1)[0]
    schemes = {name: EVERY[name] for name in ("int8-dynamic", "int4, asymmetric", "nf4", "gptq", "awq")}
    makes = {name: blocks if name in CALIBRATED else transposed for name in schemes}
    ones = {name: mw.quantize(makes[name](), scheme, batches(3)) for name, scheme in schemes.items()}

    @torch.no_grad()
    def program() -> None:
        for name, scheme in schemes.items():
            found = mw.quantize(marked(makes[name](), MESHES[mesh]), scheme, batches(3))
            assert differences(state_of(ones[name]), state_of(found)) == [], name
            torch.testing.assert_close(mw.unshard_dtensor(found(x)), ones[name](x), rtol=1e-5, atol=1e-5)

    mw.simulate(program, MESHES[mesh].ranks)


def test_layers_that_stay_are_the_same(tmp_path: Path) -> None:
    model: Any = blocks()
    weight, exact = model[0].up.weight, state_of(model)
    with pytest.raises(CalibrationError):
        mw.quantize(model, CALIBRATED["gptq"], [torch.full((2, 64), torch.nan)])
    assert differences(exact, state_of(model)) == []
    left = outline(model, Scheme(INT4, targets=("re:1",)))
    assert list(left.layers) == ["1.up", "1.down"]
    assert set(left.left_out) == {"0.up", "0.down"}
    mw.quantize(model, Scheme(INT4, targets=("re:1",)))
    assert type(model[0].up) is Conv1D
    assert model[0].up.weight is weight
    assert repr(model[0].up) == "Conv1D(nf=96, nx=64)"
    assert not isinstance(model[1].up, Conv1D)
    mw.save_quantized(model, tmp_path / "q")
    assert differences(state_of(model), state_of(mw.load_quantized(blank(), tmp_path / "q"))) == []


def blank() -> nn.Module:
    model = blocks()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
    return model


def test_a_target_names_the_class() -> None:
    model: Any = mw.quantize(transposed(), Scheme(INT4, targets=("Conv1D",)))
    assert isinstance(model[2], nn.Linear)
    assert not isinstance(model[0], Conv1D)
    with pytest.raises(QuantizeError, match="re:"):
        mw.quantize(transposed(), Scheme(INT4, targets=("Conv2D",)))


def test_a_shared_weight_stays() -> None:
    model: Any = blocks()
    model[1].up.weight = model[0].up.weight
    assert outline(model, Scheme(INT4)).left_out == dict.fromkeys(("0.up", "1.up"), "another module uses its weight")
    mw.quantize(model, Scheme(INT4))
    assert model[1].up.weight is model[0].up.weight


@pytest.mark.parametrize("mesh", ["one", "dp 2 x tp 2", "rows, uneven"])
def test_a_saved_model_is_loaded(mesh: str, tmp_path: Path) -> None:
    one = mw.quantize(blocks(), Scheme(INT4))
    mw.save_quantized(one, tmp_path / "q")
    told = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert told["format"] == "meshwright"
    assert "quant_method" not in told

    def loaded() -> list[str]:
        model = blank() if mesh == "one" else marked(blank(), MESHES[mesh])
        found = mw.load_quantized(model, tmp_path / "q")
        if mesh != "one":
            mw.save_quantized(found, tmp_path / "again")
        return differences(state_of(one), state_of(found))

    assert mw.simulate(loaded, 1 if mesh == "one" else MESHES[mesh].ranks)[0] == []
    if mesh != "one":
        for name in ("model.safetensors", "config.json"):
            assert (tmp_path / "q" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_a_file_of_another_library_leaves_them_exact(tmp_path: Path) -> None:
    saved: Any = transposed()
    mw.save_quantized(mw.quantize(saved, Scheme(INT4, targets=("2",))), tmp_path / "q")
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    assert config["quantization_config"].pop("ignore") == ["0", "4"]
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    found: Any = mw.load_quantized(transposed(), tmp_path / "q")
    assert isinstance(found[0], Conv1D)
    assert differences(state_of(saved), state_of(found)) == []


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=16)
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.mark.filterwarnings("ignore")
def test_gpt2_is_quantized_and_transformers_refuses_its_files(tmp_path: Path) -> None:
    tokens = [{"input_ids": torch.arange(i, i + 16).view(2, 8)} for i in range(3)]
    scheme = Scheme.preset("w4a16-gptq", group_size=16)
    assert len(outline(gpt2(), scheme).layers) == 8
    lines: list[str] = []
    model = mw.quantize(gpt2(), scheme, tokens, progress=lines.append)
    twin = mw.quantize(linear_twin(gpt2()), scheme, tokens)
    assert differences(state_of(twin), state_of(model)) == []
    assert [line.partition(":")[0] for line in lines] == ["transformer.h.0", "transformer.h.1"]
    mw.save_quantized(model, tmp_path / "q")
    assert differences(state_of(model), state_of(mw.load_quantized(gpt2(), tmp_path / "q"))) == []
    with pytest.raises(ValueError, match="quant_method"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "q")
