"""Checkpoints in the forms of GPTQ, AWQ and bitsandbytes: their numbers on one device and on meshes, and errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from benchmarks._quantized_forms import FORMS, Awq, Gptq, Nf4, Tensors, write
from meshwright.quantize import QuantizedLinear, QuantizeError

from .models import MESHES, batches, differences, perceptron, state_of


def blank() -> nn.Module:
    model = perceptron()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
    return model


def _of_32s() -> nn.Module:
    """Return a model whose sizes are multiples of 32, as packed codes of 3 bits need."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32))


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_has_the_numbers_that_its_form_describes(form: str, tmp_path: Path) -> None:
    make = _of_32s if "3 bits" in form else perceptron
    exact = write(make(), FORMS[form], tmp_path / "q")
    one = mw.load_quantized(make(), tmp_path / "q")
    assert any(isinstance(layer, QuantizedLinear) for layer in one.modules())
    for name, layer in one.named_modules():
        if isinstance(layer, QuantizedLinear):
            assert torch.equal(layer.dequantized().float(), exact.get_parameter(f"{name}.weight")), name
    x = batches(1)[0]
    assert torch.equal(one(x), exact(x))

    def loaded(mesh: str) -> tuple[list[str], torch.Tensor]:
        model = mw.load_quantized(MESHES[mesh].marked(make()), tmp_path / "q")
        return differences(state_of(one), state_of(model)), mw.unshard_dtensor(model(x))

    for mesh in ("tp 2", "rows, uneven", "ZeRO-3 x tp"):
        for found, values in mw.simulate(lambda mesh=mesh: loaded(mesh), MESHES[mesh].ranks):
            assert found == []
            assert (values - exact(x)).norm() < 1e-5 * exact(x).norm()


@pytest.mark.parametrize("form", ["gptq, act-order", "awq", "nf4, quantized scales"])
def test_stages_read_their_own_layers(form: str, tmp_path: Path) -> None:
    write(perceptron(), FORMS[form], tmp_path / "q")
    one = state_of(mw.load_quantized(blank(), tmp_path / "q"))

    def loaded() -> list[str]:
        mesh = mw.ProcessMesh([[0, 1], [2, 3]], ["pp", "tp"])
        model: Any = blank()
        for at, stage in ((0, 0), (2, 1), (4, 1)):
            model[at].weight = mw.shard_tensor(model[at].weight, mesh["pp", stage], [mw.Shard(at // 2 % 2)])
        return differences(one, state_of(mw.load_quantized(model, tmp_path / "q")))

    assert mw.simulate(loaded, 4) == [[]] * 4


def test_a_rank_reads_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.checkpoint.formats import safetensors_file

    read: list[int] = []
    plain = safetensors_file.SafetensorsFile.read

    def counted(self: Any, piece: Any, box: Any, dtype: Any) -> torch.Tensor:
        found = plain(self, piece, box, dtype)
        if piece.key.endswith(("qweight", "0.weight")):
            read.append(found.nbytes)
        return found

    monkeypatch.setattr(safetensors_file.SafetensorsFile, "read", counted)
    for form in ("gptq", "awq", "nf4"):
        write(nn.Sequential(nn.Linear(64, 64)), FORMS[form], tmp_path / form)
        read.clear()
        mw.simulate(lambda form=form: mw.load_quantized(_columns(), tmp_path / form), 4)
        assert read == [64 * 64 // 2 // 4] * 4, form


def _columns() -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 64))
    model[0].weight = mw.shard_tensor(model[0].weight, mw.ProcessMesh(range(4), ["tp"]), [mw.Shard(0)])
    return model


def test_groups_out_of_order_are_saved_and_loaded(tmp_path: Path) -> None:
    write(perceptron(), FORMS["gptq, symmetric, act-order"], tmp_path / "q")
    model = mw.load_quantized(blank(), tmp_path / "q")
    mw.save_quantized(model, tmp_path / "again")
    told = json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]
    assert told["config_groups"]["group_0"]["weights"]["actorder"] == "group"
    again = mw.load_quantized(blank(), tmp_path / "again")
    assert differences(state_of(model), state_of(again)) == []


def test_biases_of_zeros_are_left_out(tmp_path: Path) -> None:
    def with_bias(tensors: Tensors) -> None:
        tensors["2.bias"] = torch.zeros(80, dtype=torch.float16)

    write(perceptron(), Gptq(), tmp_path / "q", change=with_bias)
    assert mw.load_quantized(blank(), tmp_path / "q").get_submodule("2").bias is None


def changed(**told: Any) -> Callable[[Path], None]:
    """Return a function that changes the configuration of a folder."""

    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] |= told
        (folder / "config.json").write_text(json.dumps(config))

    return change


def with_tensor(name: str, new: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Tensors], None]:
    """Return a function that replaces a tensor of the files, or removes it."""

    def change(tensors: Tensors) -> None:
        found = new(tensors.pop(name, torch.zeros(0)))
        if found is not None:
            tensors[name] = found

    return change


CASES: dict[str, tuple[Gptq | Awq | Nf4, Callable[[Path], None] | None, Callable[[Tensors], None] | None, str]] = {
    "another form": (Gptq(), changed(quant_method="aqlm"), None, "'aqlm'"),
    "5 bits": (Gptq(), changed(bits=5), None, "bits 5"),
    "bits that are no integer": (Gptq(), changed(bits=4.0), None, "num_bits=4.0"),
    "a version that is no text": (Gptq(), changed(checkpoint_format=["gptq"]), None, "['gptq']"),
    "a kernel's packing": (Gptq(), changed(checkpoint_format="marlin"), None, "marlin"),
    "layers with own numbers": (Gptq(), changed(dynamic={"-:.*": {}}), None, "dynamic"),
    "no group size": (Gptq(), changed(group_size="128"), None, "group_size '128'"),
    "another group size": (Gptq(), changed(group_size=8), None, "scales"),
    "zero points that are not symmetric": (Gptq(), changed(sym=True), None, "sym: false"),
    "a group that does not exist": (Gptq(), None, with_tensor("0.g_idx", lambda x: x + 1), "the groups 1 to 4"),
    "scales that are integers": (Gptq(), None, with_tensor("0.scales", lambda x: x.int()), "0.scales"),
    "scales of 8 bits": (Gptq(), None, with_tensor("0.scales", lambda x: x.to(torch.float8_e5m2)), "0.scales"),
    "no scales": (Gptq(), None, with_tensor("0.scales", lambda x: None), "no such tensor"),
    "codes of another size": (Gptq(), None, with_tensor("0.qweight", lambda x: x[:-1].clone()), "0.qweight"),
    "a bias of another model": (Gptq(), None, with_tensor("2.bias", lambda x: torch.ones(80)), "not zero"),
    "a bias of 8 bits": (
        Gptq(), None, with_tensor("2.bias", lambda x: torch.zeros(80, dtype=torch.float8_e5m2)), "2.bias",
    ),
    "AWQ for another kernel": (Awq(), changed(version="gemv"), None, "gemv"),
    "AWQ in 8 bits": (Awq(), changed(bits=8), None, "bits 8"),
    "fp4": (Nf4(), changed(bnb_4bit_quant_type="fp4"), None, "fp4 weights"),
    "LLM.int8": (Nf4(), changed(load_in_4bit=False, load_in_8bit=True), None, "int8 weights"),
    "other numbers": (Nf4(), None, with_tensor("0.weight.quant_map", lambda x: x / 2), "other numbers"),
    "blocks over two rows": (Nf4(), None, with_tensor("2.weight.absmax", lambda x: x[:96].clone()), "two rows"),
    "another shape": (Nf4(told={"shape": [48, 65]}), None, None, "shape [48, 65]"),
    "a state that is no text": (
        Nf4(), None, with_tensor("0.weight.quant_state.bitsandbytes__nf4", lambda x: x + 100), "quant_state",
    ),
    "no offset": (Nf4(nested=True, told={"nested_offset": None}), None, None, "nested_offset"),
}  # fmt: skip


def test_words_of_awq_with_codes_of_no_output_are_refused(tmp_path: Path) -> None:
    def of_12_outputs(tensors: Tensors) -> None:
        tensors["0.qweight"] = tensors["0.qweight"][:, :1].clone()
        tensors["0.qzeros"] = tensors["0.qzeros"][:, :2].clone()
        tensors["0.scales"], tensors["0.bias"] = tensors["0.scales"][:, :12].clone(), tensors["0.bias"][:12].clone()

    write(nn.Sequential(nn.Linear(64, 16)), Awq(), tmp_path / "q", change=of_12_outputs)
    model = nn.Sequential(nn.Linear(64, 12))
    before = state_of(model)
    with pytest.raises(QuantizeError, match="12 outputs"):
        mw.load_quantized(model, tmp_path / "q")
    assert differences(before, state_of(model)) == []


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_that_does_not_fit_is_refused(case: str, tmp_path: Path) -> None:
    form, config, change, text = CASES[case]
    write(perceptron(), form, tmp_path / "q", change=change)
    if config is not None:
        config(tmp_path / "q")

    def program() -> list[str]:
        model = MESHES["tp 2"].marked(blank())
        before = state_of(model)
        with pytest.raises((QuantizeError, mw.errors.CheckpointError)) as caught:
            mw.load_quantized(model, tmp_path / "q")
        assert text in str(caught.value)
        return differences(before, state_of(model))

    assert mw.simulate(program, 2) == [[]] * 2
