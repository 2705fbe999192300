"""The manifest of a checkpoint: one JSON text that says what is where, and that its own SHA-256 covers.

    {"kind", "format", "versions", "world",
     "meshes":  [{"shape", "names", "ranks"}],
     "files":   {file: {"bytes", "sha256"}},
     "tensors": {name: {"spec": "f32[8@dp, 16]", "mesh": 0, "files": [file, …], "crc32": [number, …]}},
     "values":  {name: value},
     "sha256"}

The parts of a tensor, and so their shapes and places, follow from its spec; `files` says where each is, in the order of
`parts_of`. The manifest is written last. A folder without a valid one is no checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from meshwright.layout import MeshwrightError, ProcessMesh, parse_spec

from ._catalogue import Catalogue, Entry, FileFacts, OpenFile, Piece, file_name
from ._errors import CheckpointFileError, bad_file, no_system
from ._safetensors import open_file
from ._share import parts_of
from ._values import decoded

KIND, FORMAT, MANIFEST = "meshwright checkpoint", 1, "manifest.json"


@dataclass(frozen=True, slots=True)
class Own(Catalogue):
    """A checkpoint in the format of this package."""

    kind = "meshwright"

    def opened(self, file: str) -> AbstractContextManager[OpenFile]:
        return open_file(self.folder / file)


def manifest_text(
    tensors: Mapping[str, Entry], values: Mapping[str, Any], files: Mapping[str, FileFacts], world: int
) -> str:
    """The manifest; `values` are JSON already."""
    meshes = list(dict.fromkeys(entry.mesh for entry in tensors.values() if entry.mesh is not None))
    content: dict[str, Any] = {
        "kind": KIND,
        "format": FORMAT,
        "versions": {"meshwright": version("meshwright"), "torch": version("torch")},
        "world": world,
        "meshes": [mesh_json(mesh) for mesh in meshes],
        "files": {name: {"bytes": facts.nbytes, "sha256": facts.sha256} for name, facts in sorted(files.items())},
        "tensors": {name: _entry_json(entry, meshes) for name, entry in tensors.items()},
        "values": dict(values),
    }
    return json.dumps({**content, "sha256": _digest(content)}, allow_nan=False, indent=1)


def mesh_json(mesh: ProcessMesh) -> dict[str, Any]:
    return {"shape": list(mesh.shape), "names": list(mesh.dim_names), "ranks": list(mesh.process_ids)}


def mesh_of(text: Mapping[str, Any]) -> ProcessMesh:
    """The mesh that `mesh_json` said."""
    ranks: Any = list(text["ranks"])
    for size in reversed(text["shape"][1:]):
        ranks = [ranks[at : at + size] for at in range(0, len(ranks), size)]
    return ProcessMesh(ranks, text["names"])


def _entry_json(entry: Entry, meshes: Sequence[ProcessMesh | None]) -> dict[str, Any]:
    files, sums = [piece.file for piece in entry.pieces], [piece.crc32 for piece in entry.pieces]
    return {"spec": entry.lies, "mesh": meshes.index(entry.mesh), "files": files, "crc32": sums}


def _digest(content: Mapping[str, Any]) -> str:
    return sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_manifest(folder: Path) -> Own:
    """The checkpoint in a folder. Raises CheckpointFileError where there is none, or a manifest that was changed."""
    path = folder / MANIFEST
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise bad_file(
            path, "no such file", "a checkpoint has a manifest, written last",
            "the folder of a checkpoint that was saved to its end",
        ) from error  # fmt: skip
    except OSError as error:
        raise no_system(path, error) from error
    except (ValueError, RecursionError) as error:
        raise bad_file(path, "no JSON, or a part of one", str(error)) from error
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise bad_file(path, "JSON of something else", f"it does not say kind: {KIND!r}", "the folder of a checkpoint")
    if content.get("format") != FORMAT:
        raise bad_file(path, f"format {content.get('format')}", f"this version reads format {FORMAT}",
                       "the version of Meshwright that wrote it, or a newer one")  # fmt: skip
    said = content.pop("sha256", None)
    if said != _digest(content):
        raise bad_file(path, "another SHA-256 than it says", "the manifest was changed")
    return _checked(folder, path, content)


def _checked(folder: Path, path: Path, content: Any) -> Own:
    try:
        meshes = [mesh_of(mesh) for mesh in content["meshes"]]
        files = {file_name(folder, n): FileFacts(f["bytes"], f["sha256"]) for n, f in content["files"].items()}
        tensors = {name: _entry_of(folder, name, entry, meshes) for name, entry in content["tensors"].items()}
        values = {name: decoded(value) for name, value in content["values"].items()}
        about = {key: content[key] for key in ("format", "versions", "world")}
    except CheckpointFileError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, MeshwrightError) as error:
        raise bad_file(path, "a manifest of another form", str(error).split("\n")[0]) from error
    return Own(folder, tensors, values, files, about)


def _entry_of(folder: Path, name: str, entry: Mapping[str, Any], meshes: Sequence[ProcessMesh]) -> Entry:
    mesh = meshes[entry["mesh"]]
    spec = parse_spec(entry["spec"], mesh)
    pieces = [
        Piece(file_name(folder, file), name, part.runs, crc32)
        for part, file, crc32 in zip(parts_of(spec), entry["files"], entry["crc32"], strict=True)
    ]
    return Entry(tuple(spec.shape), spec.dtype, tuple(pieces), entry["spec"], mesh)


def check_sizes(catalogue: Catalogue) -> None:
    """Raises CheckpointFileError where a file is not there, or has not the length that was written down."""
    for name, facts in catalogue.files.items():
        path = catalogue.folder / name
        try:
            length = path.stat().st_size
        except FileNotFoundError as error:
            raise bad_file(path, f"no such file; {catalogue.held_in(name)} should lie in it",
                           "the checkpoint says that it is there") from error  # fmt: skip
        except OSError as error:
            raise no_system(path, error) from error
        if facts.nbytes is not None and length != facts.nbytes:
            raise bad_file(path, f"a file of {length} bytes; {catalogue.held_in(name)} should lie in it",
                           f"the manifest says {facts.nbytes} bytes")  # fmt: skip
