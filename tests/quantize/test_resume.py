"""An interrupted calibration goes on from its finished stages, on any mesh, with the numbers of one that was not."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.models import Llama, LlamaConfig, mark
from meshwright.quantize import CalibrationError, NumberFormat, QuantizedLinear, Scheme

from .models import INT4, MESHES, batches, differences, perceptron, state_of

CONFIG = LlamaConfig(vocab=32, hidden=32, layers=2, heads=2, kv_heads=1, feed_forward=48)
SCHEMES = {
    "gptq": Scheme(INT4, method="gptq", act_order=True, ignore=()),
    "awq": Scheme(INT4, method="awq"),
    "smoothquant": Scheme.preset("w8a8-smoothquant"),
}
READ = "(read, not calibrated)"


class Interrupted(Exception):
    pass


def llama() -> Llama:
    """Return a model whose norms make some features much larger than others."""
    model = Llama(CONFIG)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p[::7] *= 20
    return model


def texts(seed: int = 3) -> list[tuple[Tensor, Tensor]]:
    tokens = torch.randint(0, CONFIG.vocab, (3, 2, 2, 8), generator=torch.Generator().manual_seed(seed))
    return [(x[0], x[1]) for x in tokens]


def interrupt(folder: Path, scheme: Scheme, at: int = 1) -> None:
    """Calibrate until the line number `at`, which is that of a finished stage."""
    lines: list[str] = []

    def progress(line: str) -> None:
        lines.append(line)
        if len(lines) == at:
            raise Interrupted

    with pytest.raises(Interrupted):
        mw.quantize(llama(), scheme, texts(), progress=progress, resume=folder)


def on_two_ranks(model: Llama) -> Llama:
    mark(model, mw.ProcessMesh(np.arange(2).reshape(1, 1, 2), ["pp", "dp", "tp"]))
    return model


@pytest.mark.parametrize("method", SCHEMES)
def test_a_resumed_model_is_that_of_one_call(method: str, tmp_path: Path) -> None:
    """It is resumed on one device, on two ranks, and then on one device from what two ranks have written."""
    scheme = SCHEMES[method]
    one = mw.quantize(llama(), scheme, texts())
    interrupt(tmp_path / "at", scheme)
    shutil.copytree(tmp_path / "at", tmp_path / "ranks")
    lines: list[str] = []
    other = mw.quantize(llama(), scheme, texts(), progress=lines.append, resume=str(tmp_path / "at"))
    assert [READ in line for line in lines] == [True] + [False] * (len(lines) - 1)
    assert list(state_of(one)) == list(state_of(other))
    assert differences(state_of(one), state_of(other)) == []

    def program() -> list[str]:
        model = mw.quantize(on_two_ranks(llama()), scheme, texts(), resume=tmp_path / "ranks")
        return differences(state_of(one), state_of(model))

    assert mw.simulate(program, 2) == [[], []]
    lines.clear()
    again = mw.quantize(llama(), scheme, texts(), progress=lines.append, resume=tmp_path / "ranks")
    assert all(READ in line for line in lines)
    assert differences(state_of(one), state_of(again)) == []
    assert errors_of(one) == errors_of(again)


def errors_of(model: nn.Module) -> list[float | None]:
    return [layer.error for layer in model.modules() if isinstance(layer, QuantizedLinear)]


FORMS = {
    "one scale, stored inputs": Scheme.preset("fp8"),
    "asymmetric": Scheme(NumberFormat(3, strategy="group", group_size=16, symmetric=False), method="gptq"),
    "asymmetric, stored inputs": Scheme(NumberFormat(8, symmetric=False), NumberFormat(8, strategy="tensor")),
    "nvfp4": Scheme(NumberFormat(4, "float", "tensor_group", 16), method="awq"),
    "mxfp4": Scheme(NumberFormat(4, "float", "group", 32), method="gptq", ignore=("2", "4")),
    "tensor": Scheme(NumberFormat(8, strategy="tensor"), method="gptq"),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_weight_is_read_as_it_was_written(form: str, tmp_path: Path) -> None:
    first = mw.quantize(perceptron(), FORMS[form], batches(2), resume=tmp_path)
    again = mw.quantize(perceptron(), FORMS[form], batches(2), resume=tmp_path)
    assert list(first.state_dict()) == list(again.state_dict())
    assert differences(state_of(first), state_of(again)) == []
    assert errors_of(first) == errors_of(again)


@pytest.mark.parametrize("mesh", ["rows, uneven", "dp 2 x tp 2", "parallelized"])
def test_stages_of_one_device_are_read_on_every_mesh(mesh: str, tmp_path: Path) -> None:
    """Marks and parallelism change no digest: neither attributes of modules nor the names of their classes."""
    one = mw.quantize(perceptron(), SCHEMES["gptq"], batches(), resume=tmp_path)
    before = contents(tmp_path)

    def program() -> list[str]:
        model = perceptron()
        if mesh in MESHES:
            MESHES[mesh].marked(model)
        else:
            optimizer = torch.optim.AdamW(model.parameters())
            mw.parallelize(model, optimizer, mw.ProcessMesh([0, 1], ["dp"]), mw.Parallelism(zero=3))
        return differences(state_of(one), state_of(mw.quantize(model, SCHEMES["gptq"], batches(), resume=tmp_path)))

    ranks = MESHES[mesh].ranks if mesh in MESHES else 2
    assert mw.simulate(program, ranks) == [[]] * ranks
    assert contents(tmp_path) == before


def scaled(name: str) -> Llama:
    """Return the model with one number changed by the last bit."""
    model = llama()
    with torch.no_grad():
        x = model.get_parameter(name).view(-1)
        x[0] = x[0].nextafter(torch.tensor(9.0))
    return model


def with_eps() -> Llama:
    model = llama()
    norm: Any = model.get_submodule("blocks.0.attention_norm")
    norm.eps *= 2
    return model


def swapped() -> list[tuple[Tensor, Tensor]]:
    """Return batches with the same sums and other tokens."""
    return [(x.flip(1), y) for x, y in texts()]


AWQ = SCHEMES["awq"]
OTHERS: dict[str, tuple[Callable[[], Llama], Scheme, Callable[[], Any], str]] = {
    "another method": (llama, Scheme(INT4, method="gptq"), texts, "another scheme"),
    "another damping": (llama, Scheme(INT4, method="awq", damping=0.02), texts, "another scheme"),
    "other data": (llama, AWQ, swapped, "other calibration data"),
    "more data": (llama, AWQ, lambda: [*texts(), *texts(4)], "other calibration data"),
    "other weights": (lambda: scaled("blocks.0.attention.q.weight"), AWQ, texts, "another model"),
    "other words": (lambda: scaled("entry.embed.weight"), AWQ, texts, "another model"),
    "another norm": (with_eps, AWQ, texts, "another model"),
}


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    interrupt(folder, AWQ)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(folder: Path, make: Callable[[], Llama], scheme: Scheme, data: Any) -> CalibrationError:
    """Return the error of one device, after a check that two ranks have the same, and that nothing has changed."""
    before = contents(folder)

    def attempt(model: Llama) -> CalibrationError:
        names = list(model.state_dict())
        with pytest.raises(CalibrationError) as caught:
            mw.quantize(model, scheme, data, resume=folder)
        assert list(model.state_dict()) == names
        return caught.value

    one = attempt(make())
    others = mw.simulate(lambda: attempt(on_two_ranks(make())), 2)
    assert [error.args for error in others] == [one.args, one.args]
    assert contents(folder) == before
    assert "another folder" in one.write
    return one


@pytest.mark.parametrize("case", OTHERS)
def test_results_of_others_are_refused_and_not_overwritten(case: str, interrupted: Path) -> None:
    make, scheme, data, found = OTHERS[case]
    assert found in refused(interrupted, make, scheme, data()).found


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a bit": lambda stage: flip(stage / "model.safetensors"),
    "truncated": lambda stage: os.truncate(stage / "model.safetensors", 1000),
    "no file": lambda stage: (stage / "model.safetensors").unlink(),
    "no checksums": lambda stage: (stage / "meshwright.checksums.json").unlink(),
    "another checkpoint": lambda stage: (shutil.rmtree(stage), mw.save_state_dict({"x": torch.ones(2)}, stage)),
    "a file": lambda stage: (shutil.rmtree(stage), stage.write_text("stage")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_results_are_refused(damage: str, interrupted: Path, tmp_path: Path) -> None:
    shutil.copytree(interrupted, tmp_path / "copy")
    DAMAGES[damage](tmp_path / "copy" / "stage_00001")
    assert str(tmp_path / "copy" / "stage_00001") in str(refused(tmp_path / "copy", llama, AWQ, texts()))


def test_a_stage_that_was_removed_is_calibrated_again(interrupted: Path, tmp_path: Path) -> None:
    one = mw.quantize(llama(), AWQ, texts(), resume=tmp_path)
    shutil.rmtree(tmp_path / "stage_00001")
    lines: list[str] = []
    other = mw.quantize(llama(), AWQ, texts(), progress=lines.append, resume=tmp_path)
    assert [READ in line for line in lines] == [False, True, True]
    assert differences(state_of(one), state_of(other)) == []
    assert contents(tmp_path / "stage_00001") == contents(interrupted / "stage_00001")


def test_a_folder_without_calibration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="leave out resume="):
        mw.quantize(perceptron(), "int8", resume=tmp_path)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CalibrationError, match="a folder that can be written"):
        mw.quantize(perceptron(), SCHEMES["gptq"], batches(), resume=tmp_path / "file")


def test_ranks_with_other_folders_are_refused(tmp_path: Path) -> None:
    def program() -> None:
        mw.quantize(on_two_ranks(llama()), AWQ, texts(), resume=tmp_path if mw.get_rank() else None)

    with pytest.raises(CalibrationError, match=r"on rank 1, and None on rank 0"):
        mw.simulate(program, 2)
