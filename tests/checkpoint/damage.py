"""Checkpoints of every form, and all kinds of damage to the fields of their files."""

from __future__ import annotations

import json
import pickletools
import re
import shutil
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import meshwright as mw
from meshwright.checkpoint import CheckpointError, save
from meshwright.checkpoint.formats import hub_format
from meshwright.checkpoint.formats.checksum_file import CHECKSUMS
from meshwright.layout import ProcessMesh, parse_layout

from .oracle import laid, numbered

PAIR = ProcessMesh([0, 1], ["x"])
FORMS = ("meshwright", "safetensors", "index", "dcp")
HUGE: list[Any] = [
    *(-1, 2**31, 2**63, 10**30, -(2**70), 1e308, 0.5, None, True, "", "..", "../x", "/etc/passwd", "a\x1b[2J"),
    *([], {}, [[]], [2**62, 2**62], ["rank_00000.safetensors"] * 9, "f32[1000000000 * 4@x]"),
    *("f32[99999999999999@x, 3]",),
]  # fmt: skip
"""Values that replace each value of a JSON text."""


def whole() -> dict[str, Tensor]:
    return {"a": numbered((4, 3)), "b": torch.ones(5, dtype=torch.bfloat16), "c": torch.tensor(7.0)}


def saved(folder: Path, form: str) -> Path:
    """Return a checkpoint of two ranks in a form; "index" is safetensors in several files."""

    def program() -> None:
        state: dict[str, Any] = {name: x for name, x in whole().items() if name != "a"}
        state["a"] = laid(whole()["a"], (PAIR, parse_layout("[@x, :]")))
        if form == "index":
            tensors = {name: mw.engine.training.state_checkpoint.held(x) for name, x in state.items()}
            save(folder / form, tensors, {}, hub_format.HubFormat(20)).wait()
        else:
            values = (
                {} if form == "safetensors" else {"step": 3, "options": [{"lr": 0.5, "betas": (0.9, float("inf"))}]}
            )
            mw.save_state_dict(state | values, folder / form, format=form)

    mw.simulate(program, 2)
    return folder / form


def outcome(folder: Path) -> str:
    """Load all tensors; return "loaded", or the text of a CheckpointError. Other errors are raised."""
    state = {name: torch.zeros_like(x) for name, x in whole().items()}
    told: CheckpointError | None = None
    try:
        mw.load_state_dict(state, folder)
    except CheckpointError as error:
        told = error
    if told is None:
        return "loaded"
    assert all((told.asked, told.found, told.why, told.write)), told
    assert not any(x.any() for x in state.values()), "half of it was loaded"
    return str(told)


def right(folder: Path) -> bool:
    """True if the folder loads, with the numbers that were saved."""
    state = {name: torch.zeros_like(x) for name, x in whole().items()}
    mw.load_state_dict(state, folder)
    return all(torch.equal(x, whole()[name]) for name, x in state.items())


def with_bytes(path: Path, data: bytes) -> Callable[[], None]:
    """Write other bytes; return a function that restores the old ones."""
    old = path.read_bytes()
    path.write_bytes(data)
    return lambda: path.write_bytes(old) and None


def fields(path: Path) -> list[int]:
    """Return the first byte of every field of a file, whatever its form, and the last byte of the file."""
    data = path.read_bytes()
    if path.suffix == ".json":
        found = _json_fields(data, 0, len(data))
    elif path.name == ".metadata":
        found = _pickle_fields(data, 0)
    elif path.suffix == ".safetensors":
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        tensors = [8 + length + field["data_offsets"][0] for n, field in header.items() if n != "__metadata__"]
        found = [*range(8), *_json_fields(data, 8, 8 + length), *tensors]
    else:
        found = _zip_fields(data)
    return sorted({at for at in (*found, len(data) - 1) if at < len(data)})


def _json_fields(data: bytes, start: int, stop: int) -> list[int]:
    return [
        start + m.start() for m in re.finditer(rb'"(?:[^"\\]|\\.)*"|[\[\]{},:]|[^\s\[\]{},:"]+|\s+', data[start:stop])
    ]


def _pickle_fields(data: bytes, start: int) -> list[int]:
    """Return the place of each instruction, and of its argument."""
    places = [at or 0 for _, _, at in pickletools.genops(data)]
    return [start + at + more for at in places for more in (0, 1)]


def _zip_fields(data: bytes) -> list[int]:
    """Return every byte of the headers of archives, the first of each name, and the first and last of each member."""
    found: list[int] = []
    for mark, size in ((b"PK\3\4", 30), (b"PK\1\2", 46), (b"PK\5\6", 22)):
        for m in re.finditer(re.escape(mark), data):
            found += [*range(m.start(), m.start() + size + 1)]
    for m in re.finditer(rb"\x80\x02", data):
        end = data.find(b"PK", m.start())
        found += [m.start(), (m.start() + end) // 2, end - 1]
    return found


def places(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a JSON tree."""
    yield at
    inside = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in inside:
        yield from places(value, (*at, key))


def changed(tree: Any, at: tuple[Any, ...], value: Any) -> Any:
    """Return a JSON tree with another value at a path."""
    if not at:
        return value
    copy: Any = dict(tree) if isinstance(tree, dict) else list(tree)
    copy[at[0]] = changed(tree[at[0]], at[1:], value)
    return copy


def resealed(content: Any) -> bytes:
    """Return a JSON text with the digest that a reader expects, if it is an object."""
    if not isinstance(content, dict):
        return json.dumps(content).encode()
    body = json.dumps({k: v for k, v in content.items() if k != "sha256"}, indent=1)[:-2].encode()
    return body + f',\n "sha256": "{sha256(body).hexdigest()}"\n}}'.encode()


def with_header(data: bytes, header: Any) -> bytes:
    """Return the bytes of a safetensors file with another header."""
    length = int.from_bytes(data[:8], "little")
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def copied(source: Path, to: Path, checksums: bool) -> Path:
    """Return a copy of a checkpoint, with or without the checksums beside it."""
    folder = Path(shutil.copytree(source, to))
    if not checksums:
        (folder / CHECKSUMS).unlink(missing_ok=True)
    return folder
