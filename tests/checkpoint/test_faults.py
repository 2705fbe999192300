"""Faults of files are reported by file and tensor on all ranks, and nothing is loaded."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.checkpoint import CheckpointError, CheckpointFileError, open_checkpoint, verify
from meshwright.layout import ProcessMesh, parse_layout

from .oracle import laid, numbered

PAIR = ProcessMesh([0, 1], ["x"])
Harm = Callable[[Path], Any]


def cut_short(name: str, by: int = 1) -> Harm:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - by)


def flipped(name: str, at: int) -> Harm:
    def harm(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[at] ^= 4
        (folder / name).write_bytes(data)

    return harm


def put(name: str, data: bytes) -> Harm:
    return lambda folder: (folder / name).write_bytes(data)


def edit(change: Callable[[Any], Any]) -> Harm:
    """Return a damage that changes the manifest and updates its SHA-256."""

    def harm(folder: Path) -> None:
        content = json.loads((folder / "manifest.json").read_text())
        del content["sha256"]
        change(content)
        digest = sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
        (folder / "manifest.json").write_text(json.dumps({**content, "sha256": digest}))

    return harm


def moved_out(content: Any) -> None:
    content["files"]["../secret"] = content["files"].pop("rank_00000.safetensors")
    content["tensors"]["a"]["files"][0] = "../secret"


FIRST, SECOND = "rank_00000.safetensors", "rank_00001.safetensors"
FAULTS: dict[str, tuple[Harm, str]] = {
    "a file cut short": (cut_short(FIRST), rf"{FIRST}\n.*tensor a"),
    "a file that grew": (lambda folder: os.truncate(folder / FIRST, 10_000), f"{FIRST}"),
    "a file that is missing": (lambda folder: os.remove(folder / SECOND), rf"{SECOND}\n.*no such file.*tensor a"),
    "a bit of a tensor": (flipped(FIRST, -1), rf"{FIRST}\n.*tensor b was changed"),
    "a bit of a header": (flipped(FIRST, 30), rf"{FIRST}\n.*SHA-256"),
    "the length of a header": (flipped(FIRST, 6), rf"{FIRST}\n.*SHA-256"),
    "another rank's file": (lambda folder: shutil.copy(folder / SECOND, folder / FIRST), rf"{FIRST}\n"),
    "a file of something else": (put(FIRST, b"nothing"), rf"{FIRST}\n"),
    "no manifest": (lambda folder: os.remove(folder / "manifest.json"), "no manifest.json"),
    "a manifest cut short": (cut_short("manifest.json", 9), "manifest.json\n.*not JSON"),
    "a bit of the manifest": (flipped("manifest.json", 200), "manifest.json\n"),
    "a manifest of something else": (put("manifest.json", b"{}"), "JSON of something else"),
    "an empty manifest": (put("manifest.json", b""), "not JSON"),
    "a manifest of bytes": (put("manifest.json", b"\xff\xfe"), "not JSON"),
    "a manifest of a later format": (edit(lambda c: c.update(format=2)), "format 2"),
    "a path that leads elsewhere": (edit(moved_out), r"'\.\./secret'"),
    "an absolute path": (edit(lambda c: c["files"].update({"/etc/passwd": {"bytes": 1, "sha256": ""}})), "passwd"),
    "a part without a file": (edit(lambda c: c["tensors"]["a"]["files"].pop()), "an unknown form"),
    "a part too many": (edit(lambda c: c["tensors"]["b"]["files"].append(FIRST)), "an unknown form"),
    "a part elsewhere": (edit(lambda c: c["tensors"]["b"].update(files=[SECOND])), f"{SECOND}\n.*no tensor b"),
    "a tensor of another shape": (edit(lambda c: c["tensors"]["b"].update(spec="f32[41]")), "the saved name and shape"),
    "a part of another shape": (edit(lambda c: c["tensors"]["a"].update(spec="f32[4, 3@x]")), f"{FIRST}\n.*tensor a"),
    "a tensor of another dtype": (edit(lambda c: c["tensors"]["a"].update(spec="i32[4@x, 3]")), "in its dtype"),
    "a spec that is none": (edit(lambda c: c["tensors"]["a"].update(spec="rows")), "an unknown form"),
    "a mesh that is none": (edit(lambda c: c["meshes"][0].update(ranks=[0, 0])), "an unknown form"),
    "values that are none": (edit(lambda c: c["values"].update(step={"code": "x"})), "an unknown form"),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    def save() -> None:
        state = {"a": laid(numbered((4, 3)), (PAIR, parse_layout("[@x, :]"))), "b": torch.ones(40), "step": 3}
        mw.save_state_dict(state, tmp_path / "one")

    mw.simulate(save, 2)
    return tmp_path / "one"


@pytest.mark.parametrize(("harm", "words"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_reported_and_nothing_is_loaded(folder: Path, harm: Harm, words: str) -> None:
    harm(folder)
    left: list[Any] = []

    def load() -> None:
        state = {"a": laid(torch.zeros(4, 3), (PAIR, parse_layout("[:, @x]"))), "b": torch.zeros(40), "step": 0}
        left.append(state)
        mw.load_state_dict(state, folder)

    with pytest.raises(CheckpointError, match=f"(?s){words}") as caught:
        mw.simulate(load, 2)
    assert all((caught.value.asked, caught.value.found, caught.value.why, caught.value.write))
    for state in left:
        assert not state["a"].to_local().any()
        assert not state["b"].any()
        assert state["step"] == 0


@pytest.mark.parametrize(
    ("harm", "words"), [FAULTS[n] for n in ("a bit of a tensor", "a file cut short", "no manifest")]
)
def test_verify_finds_the_same_faults(folder: Path, harm: Harm, words: str) -> None:
    assert verify(folder).kind == "meshwright"
    harm(folder)
    with pytest.raises(CheckpointFileError, match=f"(?s){words}"):
        verify(folder)


def test_a_fault_on_one_rank_is_reported_by_all(folder: Path) -> None:
    """Only rank 1 requests a tensor that is missing: the others must not wait for it."""

    def load() -> str:
        with pytest.raises(CheckpointError, match="no such tensor") as caught:
            mw.load_state_dict({"b" if mw.get_rank() != 1 else "z": torch.zeros(40)}, folder)
        return "\n".join(getattr(caught.value, "__notes__", []))

    assert mw.simulate(load, 3) == ["raised on rank 1", "", "raised on rank 1"]


def test_an_existing_checkpoint_is_not_overwritten(folder: Path) -> None:
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(CheckpointError, match="never overwritten"):
        mw.save_state_dict({"x": torch.ones(2)}, folder)
    assert sorted(path.name for path in folder.iterdir()) == before
    assert [path.name for path in folder.parent.iterdir()] == ["one"]


def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from meshwright.checkpoint.formats import format_interface

    real = format_interface.write_file

    def full(path: Path, *rest: Any) -> Any:
        if "00001" in path.name:
            raise OSError(28, "No space left on device", str(path))
        return real(path, *rest)

    monkeypatch.setattr(format_interface, "write_file", full)

    def save() -> str:
        state = {"a": laid(numbered((4, 3)), (PAIR, parse_layout("[@x, :]")))}
        saving = mw.save_state_dict(state, tmp_path / "one", async_save=True)
        with pytest.raises(CheckpointError, match="No space left") as caught:
            saving.wait()
        with pytest.raises(CheckpointError, match="No space left"):
            saving.wait()
        return str(caught.value)

    assert len(set(mw.simulate(save, 2))) == 1
    assert not list(tmp_path.iterdir())


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/never",)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Evil()),
        pickle.dumps({"x": Evil()}),
        b"\x80\x04garbage",
        b"",
        pickle.dumps(print),
        pickle.dumps(3),
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"ctorch\nload\n.",
        b"ctorch._utils\n_rebuild_tensor\n.",
    ],
)
def test_metadata_of_torch_that_names_anything_else_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(CheckpointFileError, match="not metadata of a distributed checkpoint"):
        mw.load_state_dict({}, tmp_path)
    assert not Path("/tmp/never").exists()


def test_a_path_without_a_checkpoint_is_reported(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointFileError, match=r"no manifest\.json"):
            open_checkpoint(path)
    (tmp_path / "x.safetensors").write_bytes(b"12345678nothing")
    with pytest.raises(CheckpointFileError, match="not safetensors"):
        open_checkpoint(tmp_path / "x.safetensors")
