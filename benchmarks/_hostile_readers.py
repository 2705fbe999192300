"""Readers of files and texts, each with a good sample of its input and a function that makes cases of it."""

from __future__ import annotations

import json
import random
import shutil
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from benchmarks import _hostile_samples as samples
from benchmarks._hostile_inputs import ODD_KINDS, put_odd, spoiled, spoiled_data

ODD = 0.12
"""Share of cases of a file in which the file is of an odd kind."""
SEALED = 0.5
"""Share of cases of sealed data in which a value is changed and the seal is recomputed."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """JSON data inside a file, with functions that extract it and that insert it with correct checksums."""

    take: Callable[[bytes], Any]
    put: Callable[[Any, bytes], bytes]


@dataclass(frozen=True, slots=True)
class Reader:
    """A reader: `covers` names the functions that open or parse; `read` takes the path of a file, or its folder.

    Cases spoil one of the `spoils` in a copy of the folder `sample`; `text` gives the content in the place of a path.
    """

    name: str
    read: Callable[[Any], Any]
    sample: Path
    spoils: tuple[str, ...]
    covers: tuple[str, ...]
    sealed: Mapping[str, Sealed] = field(default_factory=dict[str, Sealed])
    text: bool = False
    folder: bool = False

    def case(self, draw: random.Random, place: Path) -> tuple[str, Callable[[], Any]]:
        """Put a spoiled copy into the folder `place`; return the name of the change and a function that reads it."""
        shutil.copytree(self.sample, place, dirs_exist_ok=True, symlinks=True)
        name = draw.choice(self.spoils)
        path = place / name
        change = self._spoil(draw, path)
        if self.text:
            found = path.read_bytes().decode("utf-8", "surrogateescape")
            return change, lambda: self.read(found)
        return f"{name}: {change}", lambda: self.read(place if self.folder else path)

    def _spoil(self, draw: random.Random, path: Path) -> str:
        if not self.text and draw.random() < ODD:
            kind = draw.choice(ODD_KINDS)
            put_odd(kind, path)
            return kind
        data, seal = path.read_bytes(), self.sealed.get(path.name)
        if seal is not None and draw.random() < SEALED:
            found = spoiled_data(draw, seal.take(data))
            path.write_bytes(seal.put(found, data))
            return "a value, sealed"
        change, data = spoiled(draw, data)
        path.write_bytes(data)
        return change


PLAIN = Sealed(json.loads, lambda found, data: _dumped(found))


def _dumped(found: Any) -> bytes:
    return json.dumps(found).encode("utf-8", "surrogatepass")


def _take_program(data: bytes) -> Any:
    length = int.from_bytes(data[:8], "little")
    return json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["program"])


def _put_program(found: Any, data: bytes) -> bytes:
    from safetensors.torch import load, save

    from meshwright.graph.files.program_file import KIND, _checksum

    text, tensors = _dumped(found).decode("utf-8", "replace"), load(data)
    return save(tensors, {"kind": KIND, "program": text, "sha256": _checksum(text, tensors)})


def _put_index(found: Any, data: bytes) -> bytes:
    text = _dumped(found).decode("utf-8", "replace")
    return json.dumps({"sha256": sha256(text.encode()).hexdigest(), "index": text}).encode()


def _put_manifest(found: Any, data: bytes) -> bytes:
    content = {key: value for key, value in found.items() if key != "sha256"} if isinstance(found, dict) else found
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode("utf-8", "surrogatepass")
    return _dumped({**content, "sha256": sha256(canonical).hexdigest()}) if isinstance(found, dict) else _dumped(found)


PROGRAM = Sealed(_take_program, _put_program)
INDEX = Sealed(lambda data: json.loads(json.loads(data)["index"]), _put_index)
MANIFEST = Sealed(json.loads, _put_manifest)


def readers(folder: Path) -> list[Reader]:
    """Return all readers; `folder` takes their samples."""
    texts = [_of_text(folder, name, *row) for name, row in samples.TEXTS.items()]
    files = [_of_file(folder, name, *row) for name, row in samples.FILES.items()]
    return [*texts, *files, *_programs(folder), *_checkpoints(folder)]


def _of_text(folder: Path, name: str, read: Callable[[str], Any], covers: tuple[str, ...], *texts: str) -> Reader:
    return Reader(name, read, _written(folder, name, texts), _names(texts), covers, text=True)


def _of_file(folder: Path, name: str, read: Callable[[Path], Any], covers: tuple[str, ...], *texts: str) -> Reader:
    place = _written(folder, name, texts, ".toml" if name in ("cluster file", "configuration") else "")
    names = tuple(sorted(path.name for path in place.iterdir()))
    sealed = {n: PLAIN for n, text in zip(names, texts, strict=True) if text.startswith("{") and "\n" not in text}
    return Reader(name, read, place, names, covers, sealed)


def _written(folder: Path, name: str, texts: tuple[str, ...], suffix: str = "") -> Path:
    place = folder / name.replace(" ", "-")
    place.mkdir()
    for at, text in enumerate(texts):
        (place / f"{at}{suffix}").write_text(text)
    return place


def _names(texts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(str, range(len(texts))))


def _programs(folder: Path) -> list[Reader]:
    place = folder / "programs"
    samples.save_programs(place)
    program = next(place.glob("program-*.safetensors")).name
    index = "programs-0.json"
    sealed = {program: PROGRAM, index: INDEX}
    file = ("graph.files.program_file:_read", "graph.files.program_file:decoded", "graph.files.program_file:decode")
    folders = (
        "engine.static.program_index:read_indexes",
        "engine.static.program_index:_index",
        "engine.static.program_files:load",
    )
    both = (index, program)
    return [
        Reader("program", samples.load_program, place, (program,), file, sealed),
        Reader("programs", samples.load_programs, place, both, folders, sealed, folder=True),
        Reader("kept programs", samples.find_kept, place, both, (), sealed, folder=True),
    ]


def _checkpoints(folder: Path) -> list[Reader]:
    found = list[Reader]()
    for name, load, covers in samples.CHECKPOINTS:
        place = folder / name.replace(" ", "-")
        samples.save_checkpoint(name, place)
        names = tuple(sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()))
        found.append(Reader(name, load, place, names, covers, {"manifest.json": MANIFEST}, folder=True))
    return found


def namespace(**values: Any) -> Namespace:
    """Return settings of a command."""
    return Namespace(**values)
