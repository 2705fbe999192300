"""Trust in `load`: kernels and operators of other libraries are loaded only if an argument permits it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.engine import DistModel
from meshwright.engine.static import program_files as files
from meshwright.graph import ProgramFileError, capture, load_program, save_program

BATCH = torch.ones(2, 4)


@torch.library.custom_op("trusttest::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


twice.register_fake(torch.empty_like)


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return twice(x) + 1


def static() -> DistModel:
    torch.manual_seed(0)
    return mw.to_static(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MESHWRIGHT_PROGRAMS", "off")

    def go() -> None:
        model = static()
        model.eval()
        model(BATCH)
        model.save(tmp_path)

    mw.simulate(go, 1)
    return tmp_path


def test_operators_of_another_library_are_named_by_the_caller(tmp_path: Path) -> None:
    network, path = Twice(), tmp_path / "program"
    save_program(capture(network, network, [BATCH]).program, path)
    with pytest.raises(ProgramFileError, match=r"operators=\[\.\.\.\]"):
        load_program(path)
    with pytest.raises(ProgramFileError, match=r"trusttest\.twice"):
        load_program(path, operators=["trusttest.thrice"])
    for name in ("trusttest", "trusttest.twice"):
        assert "twice" in load_program(path, operators=[name]).text()


def test_kernels_need_an_argument_and_a_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Path] = []
    monkeypatch.setattr(files, "current_communicator", lambda: None)
    monkeypatch.setattr(files, "machine", lambda: "here")
    monkeypatch.setattr(files, "with_kernels", lambda program, here, path: taken.append(path))
    name = "program-0-0000000000000000.pt2"
    path = tmp_path / name
    path.write_bytes(b"native code")
    checksum = files.sha256(b"native code").hexdigest()
    rows = [{"machine": "here", "file": name, "sha256": checksum}]
    found = files._kernels(tmp_path, rows, name.replace(".pt2", ".safetensors"))
    assert found is not None
    found.load(None)  # pyright: ignore[reportArgumentType] - no program is needed
    assert len(taken) == 1
    assert taken[0] != path
    path.write_bytes(b"other code!")
    assert found.load(None) is None  # pyright: ignore[reportArgumentType] - no program is needed
    assert len(taken) == 1
    assert files._kernels(tmp_path, [{**rows[0], "file": "../" + name}], name) is None


def renamed(path: Path, old: str, new: str) -> None:
    """Change the name of a file in an index, with a checksum that is right."""
    text = json.loads(path.read_text())["index"].replace(old, new)
    path.write_text(json.dumps({"sha256": files.sha256(text.encode()).hexdigest(), "index": text}))


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "link"])
def test_a_program_outside_its_folder_is_refused(name: str, saved: Path) -> None:
    program = next(saved.glob("program-*.safetensors"))
    program.rename(saved.parent / "moved.safetensors")
    if name == "link":
        program.symlink_to(saved.parent / "moved.safetensors")
    else:
        renamed(saved / "programs-0.json", program.name, name)
    with pytest.raises(ProgramFileError):
        mw.simulate(lambda: static().load(saved), 1)
