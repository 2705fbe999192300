"""Safetensors files of a hub, and torch's distributed checkpoints: read, written, and refused if damaged."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import meshwright as mw
from meshwright.checkpoint import CheckpointError, CheckpointFileError, convert, format_of, open_checkpoint, verify
from meshwright.checkpoint.formats import hub_format
from meshwright.layout import ProcessMesh, parse_layout

from .oracle import laid, numbered

PAIR, LINE = ProcessMesh([0, 1], ["x"]), ProcessMesh([2, 0, 1], ["x"])
quiet = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


def model(where: Callable[[Tensor], Any] = lambda x: x) -> dict[str, Any]:
    sizes = {"embed.weight": (7, 4), "layer.weight": (4, 6), "layer.bias": (6,), "scale": ()}
    return {
        name: where(numbered(shape, torch.bfloat16 if "embed" in name else torch.float32))
        for name, shape in sizes.items()
    }


def cut(x: Tensor) -> Any:
    return laid(x, (LINE, parse_layout("[:, @x]" if x.dim() == 2 else "[@x]" if x.dim() else "[]")))


def assert_whole(state: dict[str, Any]) -> None:
    for name, expected in model().items():
        assert torch.equal(mw.unshard_dtensor(state[name]), expected), name


def hub_folder(folder: Path) -> Path:
    """Write two files and an index, in the format of model hubs, and return the folder."""
    folder.mkdir()
    whole = model()
    files = {
        "model-00001-of-00002.safetensors": ["embed.weight", "scale"],
        "model-00002-of-00002.safetensors": ["layer.weight", "layer.bias"],
    }
    for file, names in files.items():
        save_file({name: whole[name] for name in names}, folder / file, {"format": "pt"})
    index = {"metadata": {"total_size": 200}, "weight_map": {n: f for f, names in files.items() for n in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_files_of_a_hub_are_read_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.checkpoint.formats import safetensors_file

    folder, read = hub_folder(tmp_path / "hub"), safetensors_file.SafetensorsFile.read
    sizes: list[int] = []

    def counted(*args: Any) -> Tensor:
        out = read(*args)
        sizes.append(out.numel())
        return out

    monkeypatch.setattr(safetensors_file.SafetensorsFile, "read", counted)

    def load() -> None:
        state = model(lambda x: cut(torch.zeros_like(x)))
        mw.load_state_dict(state, folder)
        assert_whole(state)

    mw.simulate(load, 3)
    assert max(sizes) == 14  # 7 x 2 of the largest tensor
    one = {name: torch.zeros_like(x) for name, x in model().items()}
    mw.load_state_dict(one, folder / "model.safetensors.index.json")
    assert_whole(one)
    single = {"scale": torch.zeros(())}
    mw.load_state_dict(single, folder / "model-00001-of-00002.safetensors")
    assert single["scale"].item() == 1


@pytest.mark.parametrize("largest", [1 << 30, 100, 1])
def test_files_for_a_hub_hold_whole_tensors_in_safetensors_format(tmp_path: Path, largest: int) -> None:

    def save() -> None:
        tensors = {name: mw.engine.training.state_checkpoint.held(x) for name, x in model(cut).items()}
        _save(tmp_path / "out", tensors, hub_format.HubFormat(largest))

    mw.simulate(save, 3)
    files = sorted(tmp_path.glob("out/*.safetensors"))
    found: dict[str, Tensor] = {}
    for file in files:
        found |= load_file(file)
    assert_whole(found)
    assert len(files) == {1 << 30: 1, 100: 3, 1: 4}[largest]
    if len(files) > 1:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == model().keys()
        assert index["metadata"]["total_size"] == sum(x.nbytes for x in model().values())
    again = {name: torch.zeros_like(x) for name, x in model().items()}
    mw.load_state_dict(again, tmp_path / "out")
    assert_whole(again)


def _save(path: Path, tensors: Any, format: Any) -> None:
    from meshwright.checkpoint import save

    save(path, tensors, {}, format).wait()


def test_non_tensor_values_are_refused_for_safetensors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="only tensors"):
        mw.save_state_dict({"w": torch.ones(2), "step": 1}, tmp_path / "one", format="safetensors")
    with pytest.raises(CheckpointError, match="one of meshwright, safetensors, dcp"):
        mw.save_state_dict({"w": torch.ones(2)}, tmp_path / "one", format="zip")
    assert not list(tmp_path.iterdir())


def index_of(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return harm


SECOND = "model-00002-of-00002.safetensors"


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda f: os.truncate(f / SECOND, 100), SECOND),
        (lambda f: os.remove(f / SECOND), f"{SECOND}"),
        (lambda f: (f / SECOND).write_bytes(b"x" * 100), "not safetensors"),
        (index_of(lambda c: c["weight_map"].update({"w": "../other.safetensors"})), "in its own folder"),
        (index_of(lambda c: c["weight_map"].update({"w": SECOND})), "no tensor w"),
        (index_of(lambda c: c.pop("weight_map")), "not an index"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{"), "not an index"),
    ],
)
def test_damaged_files_of_a_hub_are_reported(tmp_path: Path, harm: Callable[[Path], Any], words: str) -> None:
    folder = hub_folder(tmp_path / "hub")
    harm(folder)
    state = {name: torch.zeros_like(x) for name, x in model().items()}
    with pytest.raises(CheckpointFileError, match=words):
        mw.load_state_dict(state, folder)
    assert not any(x.any() for x in state.values())


@pytest.fixture(scope="module")
def torch_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint that torch itself wrote."""
    import torch.distributed.checkpoint as dcp

    path = tmp_path_factory.mktemp("torch") / "dcp"
    dcp.save({"model": model(), "step": 7, "betas": (0.9, 0.95)}, checkpoint_id=path, no_dist=True)
    return path


@quiet
def test_a_checkpoint_of_torch_is_read_on_any_mesh(torch_folder: Path) -> None:
    def load() -> None:
        state = {"model": model(lambda x: cut(torch.zeros_like(x))), "step": 0, "betas": None}
        mw.load_state_dict(state, torch_folder)
        assert_whole(state["model"])
        assert (state["step"], state["betas"]) == (7, (0.9, 0.95))

    mw.simulate(load, 3)


@quiet
def test_torch_reads_our_distributed_checkpoint(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    mw.simulate(lambda: mw.save_state_dict({"model": model(cut), "step": 7}, tmp_path / "dcp", format="dcp"), 3)
    state = {"model": {name: torch.zeros_like(x) for name, x in model().items()}, "step": 0}
    flat = {f"model.{name}": x for name, x in state["model"].items()} | {"step": 0}
    dcp.load(flat, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert_whole({name.removeprefix("model."): x for name, x in flat.items() if name != "step"})
    assert flat["step"] == 7
    mw.load_state_dict(state, tmp_path / "dcp")
    assert_whole(state["model"])


def damaged(at: float) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        path = folder / "__0_0.distcp"
        data = bytearray(path.read_bytes())
        data[int(len(data) * at)] ^= 16
        path.write_bytes(data)

    return harm


@quiet
@pytest.mark.parametrize(
    "harm",
    [
        lambda f: os.truncate(f / "__0_0.distcp", 500),
        lambda f: os.remove(f / "__0_0.distcp"),
        lambda f: (f / ".metadata").write_bytes((f / ".metadata").read_bytes()[:-20]),
        lambda f: (f / "__0_0.distcp").write_bytes(b"\0" * 20000),
        *[damaged(at / 40) for at in range(1, 40, 6)],
    ],
)
def test_a_damaged_checkpoint_of_torch_is_reported_or_read_right(
    torch_folder: Path, tmp_path: Path, harm: Callable[[Path], Any]
) -> None:
    folder = Path(shutil.copytree(torch_folder, tmp_path / "copy"))
    harm(folder)
    state = {name: torch.zeros_like(x) for name, x in model().items()}
    try:
        mw.load_state_dict({"model": state}, folder)
    except CheckpointFileError:
        assert not any(x.any() for x in state.values())
    else:
        assert_whole(state)


@quiet
@pytest.mark.parametrize("to", ["meshwright", "safetensors", "dcp"])
@pytest.mark.parametrize("source", ["meshwright", "safetensors", "dcp"])
def test_every_form_converts_to_every_other(tmp_path: Path, source: str, to: str) -> None:
    mw.simulate(lambda: mw.save_state_dict(model(cut), tmp_path / "from", format=source), 3)
    written = convert(open_checkpoint(tmp_path / "from"), tmp_path / "to", format_of(to))
    assert verify(written).kind == to
    state = {name: torch.zeros_like(x) for name, x in model().items()}
    mw.load_state_dict(state, written)
    assert_whole(state)


def test_part_of_a_state_converts_to_files_for_a_hub(tmp_path: Path) -> None:
    mw.save_state_dict({"model": model(), "step": 3}, tmp_path / "from")
    source = open_checkpoint(tmp_path / "from")
    assert load_file(
        convert(source, tmp_path / "to", format_of("safetensors"), "model.") / "model.safetensors"
    ).keys() == (model().keys())
    with pytest.raises(CheckpointError, match="begins with"):
        convert(source, tmp_path / "other", format_of("safetensors"), "nothing.")
