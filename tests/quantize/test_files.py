"""Checkpoints in the form of compressed-tensors: equal files and states on every mesh, and clear errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.quantize import QuantizeError, Scheme

from .models import MESHES, SCHEMES, differences, perceptron, state_of

SAVED = [name for name in SCHEMES if name != "nf4"]


def saved(path: Path, scheme: str) -> dict[str, torch.Tensor]:
    model = mw.quantize(perceptron(), SCHEMES[scheme])
    mw.save_quantized(model, path)
    return state_of(model)


@pytest.mark.parametrize("scheme", SAVED)
def test_a_saved_model_is_loaded_on_one_device_and_on_meshes(scheme: str, tmp_path: Path) -> None:
    one = saved(tmp_path / "one", scheme)
    torch.manual_seed(9)
    assert differences(one, state_of(mw.load_quantized(blank(), tmp_path / "one"))) == []

    def loaded() -> dict[str, torch.Tensor]:
        return state_of(mw.load_quantized(MESHES["dp 2 x tp 2"].marked(blank()), tmp_path / "one"))

    assert [differences(one, state) for state in mw.simulate(loaded, 4)] == [[]] * 4


def blank() -> nn.Module:
    """Return the model with other numbers."""
    model = perceptron()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
    return model


def test_files_of_a_mesh_are_those_of_one_device(tmp_path: Path) -> None:
    saved(tmp_path / "one", "w4a16")

    def save() -> None:
        mw.save_quantized(mw.quantize(MESHES["rows, uneven"].marked(perceptron()), SCHEMES["w4a16"]), tmp_path / "mesh")

    mw.simulate(save, 3)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "mesh" / name).read_bytes()


def test_the_configuration_describes_the_scheme(tmp_path: Path) -> None:
    model = mw.quantize(perceptron(), Scheme.preset("w4a16", group_size=16, ignore=("4",)))
    mw.save_quantized(model, tmp_path / "q")
    told = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert told["format"] == "pack-quantized"
    assert told["ignore"] == ["4"]
    (group,) = told["config_groups"].values()
    assert group["targets"] == ["Linear"]
    assert group["weights"] == {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16, "dynamic": False
    }  # fmt: skip
    loaded: Any = mw.load_quantized(blank(), tmp_path / "q")
    assert isinstance(loaded[4], nn.Linear)
    assert differences(state_of(model), state_of(loaded)) == []


def test_weights_on_the_meta_device_get_memory(tmp_path: Path) -> None:
    one = saved(tmp_path / "one", "int8")
    model: Any = blank()
    for at in (0, 2, 4):
        model[at].weight = nn.Parameter(model[at].weight.to("meta"))
    assert differences(one, state_of(mw.load_quantized(model, tmp_path / "one"))) == []


def with_config(path: Path, **changes: Any) -> Path:
    saved(path, "w4a16")
    file = path / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= changes
    file.write_text(json.dumps(config))
    return path


def group(of: Any = None, **weights: Any) -> dict[str, Any]:
    """Return changes of a configuration: a group of layers with these weights, and with these further entries."""
    return {"config_groups": {"g": {"targets": ["Linear"], "weights": weights, **(of or {})}}}


CASES: dict[str, dict[str, Any]] = {
    "another library": {"quant_method": "gguf"},
    "no groups": {"config_groups": None},
    "a block strategy": group(strategy="block"),
    "other numbers": group(num_bits=9),
    "other groups": group(num_bits=4, strategy="group", group_size=7),
    "bits that are no integer": group(num_bits=4.0),
    "groups of no numbers": group(num_bits=4, strategy="group", group_size=0),
    "a group size as text": group(num_bits=4, strategy="group", group_size="16"),
    "a group size as text, without a strategy": group(num_bits=4, group_size="16"),
    "inputs that are no object": group({"input_activations": 5}, num_bits=8),
    "targets that are no list": group({"targets": 7}, num_bits=8),
    "ignored layers that are no names": {"ignore": [5]},
    "a wrong regular expression": {"ignore": ["re:("]},
    "experts that are no groups": {"experts_groups": 5},
    "groups of experts that are no objects": {"experts_groups": {"g": 5}},
    "experts that the model lacks": {"experts_groups": {"g": {"targets": ["0"], "weights": {"num_bits": 8}}}},
}


@pytest.mark.parametrize("case", CASES)
def test_another_configuration_is_refused(case: str, tmp_path: Path) -> None:
    model = blank()
    before = state_of(model)
    with pytest.raises(QuantizeError):
        mw.load_quantized(model, with_config(tmp_path / "q", **CASES[case]))
    assert differences(before, state_of(model)) == []


def test_a_model_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "q", "int8")
    model = nn.Sequential(nn.Linear(64, 47))
    before = state_of(model)
    with pytest.raises(mw.errors.CheckpointError, match="weight_packed"):
        mw.load_quantized(model, tmp_path / "q")
    assert differences(before, state_of(model)) == []


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    with pytest.raises(QuantizeError, match="no quantized layer"):
        mw.save_quantized(perceptron(), tmp_path / "q")
    with pytest.raises(QuantizeError, match="nf4"):
        mw.save_quantized(mw.quantize(perceptron(), SCHEMES["nf4"]), tmp_path / "q")
    assert not (tmp_path / "q").exists()
    with pytest.raises(QuantizeError, match="config"):
        mw.load_quantized(perceptron(), tmp_path)


@pytest.mark.parametrize("name", ["../note", "a/b", "config.json", "model.safetensors", ".."])
def test_files_beside_have_names_of_their_own(name: str, tmp_path: Path) -> None:
    with pytest.raises(QuantizeError, match="names in the new folder"):
        mw.save_quantized(mw.quantize(perceptron(), "int8"), tmp_path / "q", files={name: b""})
    assert not list(tmp_path.iterdir())


def test_a_quantized_model_is_not_filled(tmp_path: Path) -> None:
    saved(tmp_path / "q", "int8")
    with pytest.raises(QuantizeError, match="before its quantization"):
        mw.load_quantized(mw.quantize(perceptron(), "int8"), tmp_path / "q")
