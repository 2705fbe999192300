"""Laws of reading for all forms, files and fields: damage is found, and hostile input is refused at low cost."""

from __future__ import annotations

import ast
import json
import os
import pickletools
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from meshwright.checkpoint import CheckpointFileError, CheckpointWarning, verify
from meshwright.checkpoint.formats.checksum_file import CHECKSUMS

from .damage import (
    FORMS,
    HUGE,
    changed,
    copied,
    fields,
    outcome,
    places,
    resealed,
    right,
    saved,
    with_bytes,
    with_header,
)

SOURCE = Path(__file__).parents[2] / "src" / "meshwright"
WRITERS = {
    "operations/save.py",
    "operations/folder_lock.py",
    "operations/step_folders.py",
    "formats/format_interface.py",
    "formats/safetensors_file.py",
    "formats/dcp_writer.py",
    "files/file_operations.py",
}
"""Modules that write, lock or remove files, and the one through which all others read."""
READS = {
    "open",
    "read_text",
    "read_bytes",
    "stat",
    "lstat",
    "exists",
    "is_file",
    "is_dir",
    "glob",
    "iterdir",
    "listdir",
    "scandir",
    "lexists",
    "safe_open",
    "fromfile",
    "memmap",
    "pread",
    "preadv",
}
LARGEST_PEAK = 100 << 20
pytestmark = pytest.mark.filterwarnings("ignore:the files of a checkpoint cannot be checked")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {form: saved(tmp_path_factory.mktemp("saved"), form) for form in FORMS}


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


@pytest.mark.parametrize("form", FORMS)
def test_undamaged_checkpoints_load(checkpoints: dict[str, Path], form: str) -> None:
    assert right(checkpoints[form])


@pytest.mark.parametrize("form", FORMS)
def test_a_flip_in_any_field_of_any_file_is_found_and_names_the_file(
    checkpoints: dict[str, Path], tmp_path: Path, form: str
) -> None:
    folder = copied(checkpoints[form], tmp_path / "copy", checksums=True)
    for file in files_of(folder):
        data = file.read_bytes()
        for n, at in enumerate(fields(file)[:: 3 if form == "dcp" else 1]):
            bit = 1 << (n % 8)
            back = with_bytes(file, data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])
            told = outcome(folder)
            back()
            assert told != "loaded", f"bit {bit} of byte {at} of {file.name}"
            assert file.name in told or CHECKSUMS in told or "manifest.json" in told, (file.name, at, told)


@pytest.mark.parametrize("form", FORMS)
def test_short_missing_extra_and_swapped_files_are_found(
    checkpoints: dict[str, Path], tmp_path: Path, form: str
) -> None:
    folder = copied(checkpoints[form], tmp_path / "copy", checksums=True)
    files = [f for f in files_of(folder) if f.name != CHECKSUMS]
    for file, other in zip(files, [*files[1:], files[0]], strict=True):
        data = file.read_bytes()
        for size in {0, 1, len(data) // 2, len(data) - 1}:
            back = with_bytes(file, data[:size])
            assert file.name in outcome(folder), (file.name, size)
            back()
        back = with_bytes(file, other.read_bytes() if other != file else b"other")
        assert file.name in outcome(folder), f"{other.name} as {file.name}"
        back()
        file.unlink()
        assert outcome(folder) != "loaded", f"no {file.name}"
        file.write_bytes(data)
        if file.suffix in (".safetensors", ".distcp"):
            extra = file.with_name(f"x_{file.name}")
            shutil.copy(file, extra)
            assert extra.name in outcome(folder)
            extra.unlink()
    assert right(folder)


@pytest.mark.parametrize("form", FORMS)
def test_a_changed_tensor_is_named(checkpoints: dict[str, Path], tmp_path: Path, form: str) -> None:
    folder = copied(checkpoints[form], tmp_path / "copy", checksums=True)
    named = set[str]()
    for file in files_of(folder):
        if file.suffix not in (".safetensors", ".distcp"):
            continue
        data = file.read_bytes()
        for at in range(0, len(data), 3 if file.suffix == ".safetensors" else 131):
            back = with_bytes(file, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            told = outcome(folder)
            back()
            named |= {name for name in "abc" if f"tensor {name} was changed" in told}
    assert named == {"a", "b", "c"}


@pytest.mark.parametrize("form", FORMS[1:])
@pytest.mark.filterwarnings("error")
def test_a_missing_file_of_checksums_is_reported(checkpoints: dict[str, Path], tmp_path: Path, form: str) -> None:
    folder = copied(checkpoints[form], tmp_path / "copy", checksums=False)
    with pytest.warns(CheckpointWarning, match=CHECKSUMS):
        assert right(folder)
    with pytest.raises(CheckpointFileError, match=CHECKSUMS):
        verify(folder)


@pytest.mark.parametrize("form", FORMS[1:])
def test_without_checksums_every_flip_is_refused_or_read(
    checkpoints: dict[str, Path], tmp_path: Path, form: str
) -> None:
    folder = copied(checkpoints[form], tmp_path / "copy", checksums=False)
    assert right(folder)
    for file in files_of(folder):
        data = file.read_bytes()
        for n, at in enumerate(fields(file)[:: 7 if form == "dcp" else 1]):
            back = with_bytes(file, data[:at] + bytes([data[at] ^ (1 << (n % 8))]) + data[at + 1 :])
            outcome(folder)  # raises nothing but CheckpointError
            back()


def test_hostile_values_in_a_manifest_cost_little(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    folder = copied(checkpoints["meshwright"], tmp_path / "copy", checksums=True)
    _walk_json(folder, folder / "manifest.json", resealed, 3)


def test_hostile_values_in_checksums_cost_little(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    for form in FORMS[1:]:
        folder = copied(checkpoints[form], tmp_path / form, checksums=True)
        _walk_json(folder, folder / CHECKSUMS, resealed, 7)


def test_hostile_values_in_an_index_or_a_header_cost_little(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    folder = copied(checkpoints["index"], tmp_path / "index", checksums=False)
    _walk_json(folder, folder / "model.safetensors.index.json", lambda c: json.dumps(c).encode())
    folder = copied(checkpoints["safetensors"], tmp_path / "one", checksums=False)
    file = folder / "model.safetensors"
    data = file.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    _walk(folder, file, [with_header(data, changed(header, at, value)) for at in places(header) for value in HUGE])


def _walk_json(folder: Path, file: Path, text: Any, stride: int = 1) -> None:
    content = json.loads(file.read_bytes())
    every = [(at, value) for at in places(content) for value in HUGE]
    _walk(folder, file, [text(changed(content, at, value)) for at, value in every[::stride]])


def _walk(folder: Path, file: Path, texts: list[bytes]) -> None:
    """Load with each text; check that it ends cheaply, in success or in a CheckpointError."""
    assert len(texts) > 50
    outcome(folder)
    tracemalloc.start()
    try:
        for text in texts:
            back = with_bytes(file, text)
            outcome(folder)
            back()
        assert tracemalloc.get_traced_memory()[1] < LARGEST_PEAK
    finally:
        tracemalloc.stop()
    assert right(folder)


def test_any_pickle_instruction_in_metadata_costs_little(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    folder = copied(checkpoints["dcp"], tmp_path / "copy", checksums=False)
    file = folder / ".metadata"
    data = file.read_bytes()
    at = [p or 0 for _, _, p in pickletools.genops(data)]
    codes = [ord(op.code) for op in pickletools.opcodes]
    texts = [data[:p] + bytes([codes[7 * n % len(codes)]]) + data[p + 1 :] for n, p in enumerate(at)]
    texts += [data[:p] + b"r\xff\xff\xff\x7f" + data[p:] for p in at[::20]]  # memo index of 2 GB
    texts += [data[:p] + b"\x8d" + b"\xff" * 7 + b"\x7f" + data[p:] for p in at[::20]]  # a text of 2**63 bytes
    texts += [data[:p] for p in at[::5]]
    _walk(folder, file, texts)


CHEAP: dict[str, bytes] = {
    "a place in the memo": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "a frame": b"\x80\x04\x95" + b"\xff" * 8 + b"N.",
    "a long number": b"\x80\x02\x8b\xff\xff\xff\x7f",
    "bytes": b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f",
    "a tuple of tuples": b"\x80\x02)" + b"\x85" * 300_000 + b".",
    "a key of tuples": b"\x80\x02})" + b"\x85" * 300_000 + b"Ns.",
    "many lists": b"\x80\x02" + b"]" * 3_000_000 + b".",
    "many dicts": b"\x80\x02" + b"}" * 3_000_000 + b".",
}  # fmt: skip


@pytest.mark.parametrize("data", CHEAP.values(), ids=CHEAP)
def test_a_small_pickle_takes_little_memory(tmp_path: Path, data: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(data)
    _refused_cheaply(tmp_path)


TEXTS: dict[str, bytes] = {
    "deep lists": b"[" * 500_000,
    "deep dicts": b'{"a":' * 200_000,
    "many lists": b"[" + b"[]," * 5_000_000 + b"[]]",
    "many dicts": b"[" + b'{"a":{}},' * 2_000_000 + b"0]",
    "a long number": b"9" * 1_000_000,
    "not a number": b"NaN",
    "zeros": b"\0" * 1_000_000,
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors.index.json", "model.safetensors", CHECKSUMS])
def test_a_hostile_text_takes_little_memory(
    checkpoints: dict[str, Path], tmp_path: Path, name: str, text: bytes
) -> None:
    folder = tmp_path
    if name == CHECKSUMS:
        folder = copied(checkpoints["safetensors"], tmp_path / "copy", checksums=False)
    header = len(text).to_bytes(8, "little") if name == "model.safetensors" else b""
    (folder / name).write_bytes(header + text)
    _refused_cheaply(folder)


def _refused_cheaply(folder: Path) -> None:
    tracemalloc.start()
    try:
        assert outcome(folder) != "loaded"
        assert tracemalloc.get_traced_memory()[1] < LARGEST_PEAK
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("form", FORMS)
def test_files_that_never_end_are_refused(checkpoints: dict[str, Path], tmp_path: Path, form: str) -> None:
    """Each file in turn is a FIFO, a device, a folder, a link to a device, and a file of a terabyte of holes."""
    folder = copied(checkpoints[form], tmp_path / "copy", checksums=True)
    for file in files_of(folder):
        data = file.read_bytes()
        for make in (os.mkfifo, os.mkdir, lambda p: os.symlink("/dev/zero", p), lambda p: p.touch()):
            file.unlink()
            make(file)
            if file.is_file() and not file.is_symlink():
                os.truncate(file, 1 << 40)
            assert outcome(folder) != "loaded", file.name
            file.rmdir() if file.is_dir() else file.unlink()
            file.write_bytes(data)


def test_files_are_read_through_one_module() -> None:
    """Every read has a time limit because no other module of the package makes one."""
    wrong: list[str] = []
    package = SOURCE / "checkpoint"
    modules = [*package.rglob("*.py"), *(SOURCE / "engine" / "training").glob("*checkpoint*.py")]
    for path in modules:
        if path.is_relative_to(package) and path.relative_to(package).as_posix() in WRITERS:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", "") or ("open" if getattr(node.func, "id", "") == "open" else "")
            if name in READS:
                wrong.append(f"{path.name}:{node.lineno} calls {name}")
    assert not wrong, "\n".join(wrong)
    assert len(modules) > 20
