"""Experts in one parameter: rounded to the nearest, sharded like the parameter, with the codes of one device."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import meshwright as mw
from meshwright.quantize import NumberFormat, QuantizedExperts, QuantizeError, Scheme, outline

from .models import INT4, SCHEMES, differences, state_of

EXPERTS, DIM, HIDDEN = 5, 32, 48
EVERY = {**SCHEMES, "nvfp4": Scheme.preset("nvfp4"), "mxfp4": Scheme.preset("mxfp4", ignore=("experts.down",))}
CALIBRATED = {name: Scheme(INT4, method=name) for name in ("gptq", "awq")}  # pyright: ignore[reportArgumentType]


class Experts(nn.Module):
    """Experts whose parameters are [experts, outputs, inputs], or transposed ones."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.is_transposed = transposed
        up, down = torch.randn(EXPERTS, HIDDEN, DIM) / DIM**0.5, torch.randn(EXPERTS, DIM, HIDDEN) / HIDDEN**0.5
        self.up, self.down = (nn.Parameter(x.mT.contiguous() if transposed else x) for x in (up, down))

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        inner = F.relu(F.grouped_mm(rows, self.matrices(self.up), offs=ends))
        return F.grouped_mm(inner, self.matrices(self.down), offs=ends)

    def matrices(self, x: Tensor) -> Tensor:
        return x if self.is_transposed else x.transpose(-2, -1)


class Model(nn.Module):
    """A linear layer, and experts with equal shares of the rows."""

    def __init__(self, transposed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.experts = nn.Linear(DIM, DIM), Experts(transposed)

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.arange(1, EXPERTS + 1, dtype=torch.int32) * (len(x) // EXPERTS)
        return self.experts(self.layer(x), ends)


def rows() -> Tensor:
    return torch.randn(4 * EXPERTS, DIM, generator=torch.Generator().manual_seed(1))


S, R = mw.Shard, mw.Replicate()
MESHES: dict[str, tuple[dict[str, int], list[Any], list[Any]]] = {
    "experts": ({"ep": 5}, [S(0)], [S(0)]),
    "experts, uneven": ({"ep": 2}, [S(0)], [S(0)]),
    "columns and rows": ({"tp": 2}, [S(1)], [S(2)]),
    "columns, uneven": ({"tp": 3}, [S(2)], [S(1)]),
    "experts and columns": ({"ep": 2, "tp": 2}, [S(0), S(1)], [S(0), S(2)]),
    "one dim twice": ({"dp": 2, "ep": 2}, [S(0), S(0)], [S(0), S(0)]),
    "ZeRO-3": ({"dp": 2}, [S(1)], [S(0)]),
    "replicas": ({"dp": 2}, [R], [R]),
}
"""Name → a mesh, and the placements of the parameters `up` and `down`."""


def marked(model: Any, mesh: str) -> Any:
    sizes, up, down = MESHES[mesh]
    grid = mw.ProcessMesh(np.arange(np.prod([*sizes.values()])).reshape(*sizes.values()), list(sizes))
    model.experts.up = mw.shard_tensor(model.experts.up, grid, up)
    model.experts.down = mw.shard_tensor(model.experts.down, grid, down)
    model.layer.weight = mw.shard_tensor(model.layer.weight, grid)
    return model


def on_ranks(mesh: str, program: Callable[[], Any]) -> list[Any]:
    return mw.simulate(program, int(np.prod([*MESHES[mesh][0].values()])))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("scheme", EVERY)
def test_codes_are_those_of_a_linear_layer_for_each_expert(scheme: str, transposed: bool) -> None:
    """A scale for the whole tensor is one for all experts: then the experts are one layer with the rows of all."""
    exact: Any = Model()
    model: Any = mw.quantize(Model(transposed), EVERY[scheme])
    numbers = model.experts.up if not transposed else model.experts.up.mT
    is_one = EVERY[scheme].weights.strategy in ("tensor", "tensor_group")
    parts = [exact.experts.up.detach().flatten(0, 1)] if is_one else exact.experts.up.detach().unbind()
    layers = [nn.Linear(DIM, len(part), bias=False) for part in parts]
    for layer, part in zip(layers, parts, strict=True):
        layer.weight = nn.Parameter(part)
    twin: Any = mw.quantize(nn.Sequential(*layers), Scheme(EVERY[scheme].weights))
    assert torch.equal(torch.cat([layer.dequantized() for layer in twin]), numbers.flatten(0, 1))


@pytest.mark.parametrize("mesh", MESHES)
def test_codes_on_a_mesh_are_those_of_one_device(mesh: str) -> None:
    x = rows()
    names = ["int4, asymmetric", "int3", "int8, one scale", "fp8-dynamic", "nvfp4"]
    ones = {name: mw.quantize(Model(), EVERY[name]) for name in names}

    @torch.no_grad()
    def program() -> None:
        for name, one in ones.items():
            model = mw.quantize(marked(Model(), mesh), EVERY[name])
            assert differences(state_of(one), state_of(model)) == [], name
            torch.testing.assert_close(mw.unshard_dtensor(model(x)), one(x), rtol=1e-4, atol=1e-4)

    on_ranks(mesh, program)


def test_buffers_are_sharded_like_the_parameter() -> None:
    def layouts(mesh: str) -> dict[str, str]:
        model: Any = mw.quantize(marked(Model(), mesh), EVERY["int4, asymmetric"])
        return {name: repr(x.spec) for name, x in model.experts.named_buffers() if "up" in name}

    assert on_ranks("experts, uneven", lambda: layouts("experts, uneven"))[0] == {
        "up_packed": "i32[5@ep, 48, 4]",
        "up_scale": "f32[5@ep, 48, 2]",
        "up_shape": "i64[3]",
        "up_zero_point": "i32[5@ep, 6, 2]",
    }
    assert on_ranks("experts and columns", lambda: layouts("experts and columns"))[0] == {
        "up_packed": "i32[5@ep, 48@tp, 4]",
        "up_scale": "f32[5@ep, 48@tp, 2]",
        "up_shape": "i64[3]",
        "up_zero_point": "i32[5@ep, 6, 2]",
    }


def test_transposed_experts_on_a_mesh() -> None:
    one = mw.quantize(Model(True), Scheme(INT4))

    @torch.no_grad()
    def program() -> None:
        model = mw.quantize(marked(Model(True), "experts and columns"), Scheme(INT4))
        assert differences(state_of(one), state_of(model)) == []
        torch.testing.assert_close(mw.unshard_dtensor(model(rows())), one(rows()), rtol=1e-4, atol=1e-4)

    on_ranks("experts and columns", program)


def test_numbers_live_for_one_call() -> None:
    model: Any = mw.quantize(Model(), Scheme(INT4))
    seen: list[Any] = []
    kind = type(model.experts).__bases__[1]
    original = kind.matrices
    try:
        kind.matrices = lambda self, x: (seen.append((id(x), weakref.ref(x))), original(self, x))[1]
        with torch.no_grad():
            model(rows())
            model(rows())
    finally:
        kind.matrices = original
    gc.collect()
    assert len(seen) == 4
    assert all(alive() is None for _, alive in seen)
    assert model.experts.up is not model.experts.up


def test_gradients_of_inputs_are_those_of_the_rounded_numbers() -> None:
    model: Any = mw.quantize(Model(), Scheme(INT4))
    twin: Any = Model()
    with torch.no_grad():
        twin.layer.weight.copy_(model.layer.dequantized())
        twin.experts.up.copy_(model.experts.up)
        twin.experts.down.copy_(model.experts.down)
    found = [rows().requires_grad_() for _ in range(2)]
    for x, each in zip(found, (model, twin), strict=True):
        each(x).square().sum().backward()
    assert torch.equal(found[0].grad, found[1].grad)  # pyright: ignore[reportArgumentType]


def test_static_steps_have_the_numbers_of_eager_ones() -> None:
    one = mw.quantize(Model(), Scheme(INT4))

    def program() -> None:
        model = mw.quantize(marked(Model(), "experts and columns"), Scheme(INT4)).eval()
        step = mw.to_static(model)
        step.eval()
        with torch.no_grad():
            torch.testing.assert_close(mw.unshard_dtensor(step(rows())), one(rows()), rtol=1e-4, atol=1e-4)

    on_ranks("experts and columns", program)


@pytest.mark.parametrize("scheme", ["int8-dynamic", "int4, asymmetric", "fp8-dynamic", "nvfp4"])
def test_a_saved_model_is_loaded_on_one_device_and_on_meshes(scheme: str, tmp_path: Path) -> None:
    one = mw.quantize(Model(), EVERY[scheme])
    mw.save_quantized(one, tmp_path / "q")
    told = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert told["format"] == "meshwright"
    assert [group["targets"] for group in told["experts_groups"].values()] == [["experts.up", "experts.down"]]
    loaded: Any = mw.load_quantized(blank(), tmp_path / "q")
    assert differences(state_of(one), state_of(loaded)) == []
    assert torch.equal(loaded(rows()), one(rows()))

    def program() -> None:
        found = mw.load_quantized(marked(blank(), "experts and columns"), tmp_path / "q")
        assert differences(state_of(one), state_of(found)) == []
        mw.save_quantized(found, tmp_path / "again")

    on_ranks("experts and columns", program)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "q" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def blank() -> Any:
    model = Model()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
    return model


def test_a_failed_load_leaves_the_model(tmp_path: Path) -> None:
    mw.save_quantized(mw.quantize(Model(), Scheme(INT4)), tmp_path / "q")
    model = blank()
    model.experts.down = nn.Parameter(torch.zeros(EXPERTS, DIM + 16, HIDDEN))
    before, kind, parameter = state_of(model), type(model.experts), model.experts.up
    with pytest.raises(mw.errors.CheckpointError, match="down_packed"):
        mw.load_quantized(model, tmp_path / "q")
    assert differences(before, state_of(model)) == []
    assert type(model.experts) is kind
    assert model.experts.up is parameter
    with pytest.raises(QuantizeError, match="another model"):
        mw.load_quantized(nn.Sequential(nn.Linear(DIM, DIM)), tmp_path / "q")


def test_a_checkpoint_of_training_is_loaded_on_another_mesh(tmp_path: Path) -> None:
    one = mw.quantize(Model(), Scheme(INT4))

    def save() -> None:
        model = mw.quantize(marked(Model(), "experts, uneven"), Scheme(INT4))
        mw.save_state_dict(model.state_dict(), tmp_path / "c")

    def load() -> None:
        model = mw.quantize(marked(blank(), "columns and rows"), Scheme(INT4))
        mw.load_state_dict(model.state_dict(), tmp_path / "c")
        assert differences(state_of(one), state_of(model)) == []

    on_ranks("experts, uneven", save)
    on_ranks("columns and rows", load)


def test_calibrated_schemes_round_experts_if_a_target_names_them() -> None:
    scheme = CALIBRATED["gptq"]
    left = outline(Model(), scheme)
    assert list(left.layers) == ["layer"]
    assert "a target names them" in left.left_out["experts.up"]
    model: Any = mw.quantize(Model(), scheme, [rows()])
    assert not isinstance(model.experts, QuantizedExperts)
    named = Scheme(INT4, method="gptq", targets=("Linear", "re:.*experts"))
    other: Any = mw.quantize(Model(), named, [rows()])
    assert torch.equal(other.layer.weight_packed, model.layer.weight_packed)
    assert torch.equal(other.experts.up_packed, mw.quantize(Model(), Scheme(INT4)).get_buffer("experts.up_packed"))
    with pytest.raises(QuantizeError):
        mw.quantize(Model(), Scheme(INT4, method="gptq", targets=("re:.*experts",)), [rows()])

    def program() -> None:
        found = mw.quantize(marked(Model(), "experts, uneven"), named, [rows()])
        assert differences(state_of(other), state_of(found)) == []

    on_ranks("experts, uneven", program)


def test_the_outline_counts_experts() -> None:
    for scheme in ("int8", Scheme(INT4), "fp8-dynamic", "nvfp4"):
        told, model = outline(Model(), scheme), mw.quantize(Model(), scheme)
        assert told.after == sum(x.numel() * x.element_size() for x in model.state_dict().values())
    assert list(outline(Model(), Scheme(INT4, targets=("experts.up",))).layers) == ["experts.up"]
    with pytest.raises(QuantizeError, match=r"experts\.up"):
        mw.quantize(Model(), Scheme(INT4, targets=("experts.upp",)))


def test_other_tensors_of_three_dims_stay_unless_they_are_named() -> None:
    model = nn.Sequential(nn.Bilinear(32, 32, 4), nn.Linear(32, 32))
    assert list(outline(model, Scheme(INT4)).left_out) == ["0.weight"]
    assert list(outline(model, Scheme(INT4, targets=("re:.*",))).layers) == ["1"]
    assert list(outline(model, Scheme(INT4, targets=("0.weight",))).layers) == ["0.weight"]


def test_bad_experts_are_refused() -> None:
    model: Any = Model()
    with torch.no_grad():
        model.experts.up[1, 2, 3] = torch.nan
    with pytest.raises(QuantizeError, match=r"quantize experts\.up"):
        mw.quantize(model, "int8")
    with pytest.raises(QuantizeError, match="fits all layers"):
        mw.quantize(Model(), Scheme(NumberFormat(4, strategy="group", group_size=32)))
    quantized = mw.quantize(Model(), "int8")
    with pytest.raises(QuantizeError, match="quantized already"):
        mw.quantize(quantized, "int8")


def test_experts_are_copied_and_pickled() -> None:
    model: Any = mw.quantize(Model(), "int8")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert differences(state_of(model), state_of(other)) == []
        assert torch.equal(other(rows()), model(rows()))


def mixture() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads)).eval()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_experts_of_transformers(implementation: str, tmp_path: Path) -> None:
    """The values are those of a model whose parameters have the rounded numbers."""
    ids = torch.arange(16).view(2, 8)
    model: Any = mw.quantize(mixture(), Scheme(INT4))
    twin = mixture()
    with torch.no_grad():
        for name, module in model.named_modules():
            other = twin.get_submodule(name)
            for key in getattr(module, "stored_experts", ()):
                other.get_parameter(key).copy_(getattr(module, key))
            if hasattr(module, "dequantized"):
                other.weight.copy_(module.dequantized())  # pyright: ignore[reportCallIssue]
        for each in (model, twin):
            each.set_experts_implementation(implementation)
        assert torch.equal(model(ids).logits, twin(ids).logits)
    mw.save_quantized(model, tmp_path / "q")
    with pytest.raises(ValueError, match="quant_method"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "q")
    assert differences(state_of(model), state_of(mw.load_quantized(mixture(), tmp_path / "q"))) == []
