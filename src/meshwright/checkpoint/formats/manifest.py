"""The manifest of a checkpoint: a JSON text with the positions of all tensors, covered by its own SHA-256.

    {"kind", "format", "versions", "world",
     "meshes":  [{"shape", "names", "ranks"}],
     "files":   {file: {"bytes", "sha256"}},
     "tensors": {name: {"spec": "f32[8@dp, 16]", "mesh": 0, "files": [file, …], "crc32": [number, …]}},
     "values":  {name: value},
     "sha256": of the bytes of the text before it}

The parts of a tensor, with their shapes and positions, follow from its spec; `files` has the file of each part, in the
order of `parts_of`. The manifest is written last. A folder without a valid one is no checkpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path
from typing import Any

import torch

from meshwright.layout import JsonValue, MeshwrightError, ProcessMesh, Product, Spec, parse_spec

from .._errors import CheckpointError, CheckpointFileError, NewerFormatError, file_error
from ..contents.catalogue import Catalogue, FileFacts, OpenFile, TensorEntry, TensorPiece, file_name
from ..contents.part_writers import parts_of
from ..files.file_operations import names_in, status
from ..files.json_text import has_seal, is_within_bound, read_json, sealed
from ..files.json_values import decode_value
from ..files.memory_budget import Budget
from ..files.safetensors_header import is_count
from .safetensors_file import open_file

KIND, FORMAT, MANIFEST = "meshwright checkpoint", 1, "manifest.json"
MOST_DIMS = 32
RUN_COST = 200
"""Most bytes of memory of one run of indices of a part."""
_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class MeshwrightCheckpoint(Catalogue):
    """A checkpoint in the format of this package."""

    kind = "meshwright"

    @property
    def is_closed(self) -> bool:
        return True

    def opened(self, file: str) -> AbstractContextManager[OpenFile]:
        return open_file(self.folder / file)


def own_version() -> str:
    """Return the version of this package; "unknown" if it runs from a folder in which it is not installed."""
    try:
        return version("meshwright")
    except PackageNotFoundError:
        return "unknown"


def manifest_text(
    tensors: Mapping[str, TensorEntry], values: Mapping[str, Any], files: Mapping[str, FileFacts], world: int
) -> bytes:
    """Return the manifest; `values` are JSON already. Raises CheckpointError for values beyond a reader's bound."""
    meshes = list(dict.fromkeys(entry.mesh for entry in tensors.values() if entry.mesh is not None))
    content: dict[str, Any] = {
        "kind": KIND,
        "format": FORMAT,
        "versions": {"meshwright": own_version(), "torch": str(torch.__version__)},
        "world": world,
        "meshes": [mesh_json(mesh) for mesh in meshes],
        "files": {name: {"bytes": facts.nbytes, "sha256": facts.sha256} for name, facts in sorted(files.items())},
        "tensors": {name: _entry_json(entry, meshes) for name, entry in tensors.items()},
        "values": dict(values),
    }
    if not is_within_bound(json.dumps(content["values"]).encode()):
        raise CheckpointError(
            "to save the values of a state",
            "more values than a reader accepts",
            "the size of a manifest is bounded, so that a hostile one cannot fill the memory",
            "save the long lists as tensors",
        )
    return sealed(content)


def mesh_json(mesh: ProcessMesh) -> dict[str, Any]:
    return {"shape": list(mesh.shape), "names": list(mesh.dim_names), "ranks": list(mesh.process_ids)}


def mesh_of(text: Mapping[str, Any]) -> ProcessMesh:
    """Return the mesh from the JSON of `mesh_json`. Raises ValueError for impossible sizes."""
    ranks: list[Any] = list(text["ranks"])
    shape: Sequence[int] = text["shape"]
    if not 0 < len(shape) <= MOST_DIMS or not all(is_count(n) for n in (*shape, *ranks)) or prod(shape) != len(ranks):
        raise ValueError(f"a mesh of shape {str(shape)[:80]} has {len(ranks)} ranks")
    for size in reversed(shape[1:]):
        ranks = [ranks[at : at + size] for at in range(0, len(ranks), size)]
    return ProcessMesh(ranks, text["names"])


def _entry_json(entry: TensorEntry, meshes: Sequence[ProcessMesh | None]) -> dict[str, Any]:
    files, sums = [piece.file for piece in entry.pieces], [piece.crc32 for piece in entry.pieces]
    return {"spec": entry.lies, "mesh": meshes.index(entry.mesh), "files": files, "crc32": sums}


def _digest(content: Mapping[str, Any]) -> str:
    return sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_manifest(folder: Path) -> MeshwrightCheckpoint:
    """Return the checkpoint in a folder.

    Raises:
        CheckpointFileError: there is no manifest, or it was changed.
    """
    path = folder / MANIFEST
    if status(path) is None:
        raise file_error(
            path,
            "no such file",
            "a complete checkpoint has a manifest, which is written last",
            "pass the folder of a complete checkpoint",
        )
    content, data = read_json(path, "text that is not JSON, or is truncated")
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise file_error(path, "JSON of something else", f"its kind is not {KIND!r}", "pass the folder of a checkpoint")
    if content.get("format") != FORMAT:
        raise _other_format(path, content)
    try:
        said = content.pop("sha256", None)
        if not has_seal(data) and said != _digest(content):  # older manifests: checksum of the content
            raise file_error(path, "a SHA-256 that differs from the recorded one", "the manifest was changed")
        return _checked(folder, content)
    except CheckpointFileError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, MeshwrightError) as error:
        raise file_error(path, "a manifest in an unknown form", str(error).split("\n")[0]) from error


def _other_format(path: Path, content: Mapping[str, Any]) -> CheckpointFileError:
    """Return the error for a manifest in another format than that of this version."""
    found, versions = content.get("format"), content.get("versions")
    writer = versions.get("meshwright") if isinstance(versions, dict) else None
    if not isinstance(found, int) or found < FORMAT:
        return file_error(path, f"format {str(found)[:80]}", f"this version reads format {FORMAT}")
    return NewerFormatError(
        f"to read {path}",
        f"format {found}" + (f", written by Meshwright {writer[:80]}" if isinstance(writer, str) else ""),
        f"this version, {own_version()}, reads format {FORMAT}",
        "use the version of Meshwright that wrote it, or a newer one",
    )


def _checked(folder: Path, content: JsonValue) -> MeshwrightCheckpoint:
    budget = Budget(folder / MANIFEST)
    meshes = [mesh_of(mesh) for mesh in content["meshes"]]
    files = {file_name(folder, name): facts_of(told) for name, told in content["files"].items()}
    tensors = {name: _entry_of(folder, name, entry, meshes, budget) for name, entry in content["tensors"].items()}
    values = {name: decode_value(value) for name, value in content["values"].items()}
    about = {key: content[key] for key in ("format", "versions", "world")}
    if strange := {p.file for entry in tensors.values() for p in entry.pieces} - files.keys():
        raise ValueError(f"parts of tensors are in {min(strange)}, which the list of files does not have")
    return MeshwrightCheckpoint(folder, tensors, values, files, about)


def facts_of(told: JsonValue) -> FileFacts:
    """Return the facts about a file from JSON. Raises ValueError for anything else."""
    nbytes, digest = told["bytes"], told["sha256"]
    if not is_count(nbytes) or not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise ValueError(f"a file has {str(nbytes)[:80]} bytes and the SHA-256 {str(digest)[:80]}")
    return FileFacts(nbytes, digest)


def _entry_of(
    folder: Path, name: str, entry: Mapping[str, Any], meshes: Sequence[ProcessMesh], budget: Budget
) -> TensorEntry:
    at, files, sums = entry["mesh"], entry["files"], entry["crc32"]
    if not is_count(at) or not all(is_count(crc32) and crc32 < 1 << 32 for crc32 in sums):
        raise ValueError(f"tensor {name[:80]} has an invalid mesh index or checksum")
    spec = parse_spec(entry["spec"], meshes[at])
    if not is_count(spec.nbytes):
        raise ValueError(f"tensor {name[:80]} has {spec.nbytes} bytes")
    budget.spend(_cost_of_parts(spec), f"the parts of tensor {name[:80]}, {entry['spec'][:80]}")
    pieces = [
        TensorPiece(file_name(folder, file), name, part.runs, crc32)
        for part, file, crc32 in zip(parts_of(spec), files, sums, strict=True)
    ]
    return TensorEntry(tuple(spec.shape), spec.dtype, tuple(pieces), entry["spec"], spec.mesh)


def _cost_of_parts(spec: Spec) -> int:
    """Return an upper bound of the memory of all parts: a product dim has a run for each outer index."""
    products = [dim for dim in spec.layout.dims if isinstance(dim, Product)]
    runs = sum(prod(size for size, _ in dim.factors[:-1]) for dim in products)
    return RUN_COST * runs * len(spec.mesh.process_ids)


def check_sizes(catalogue: Catalogue) -> None:
    """Raise CheckpointFileError if a file is missing, has another length than recorded, or is extra."""
    for name, facts in catalogue.files.items():
        path = catalogue.folder / name
        found = status(path)
        if found is None:
            raise file_error(
                path, f"no such file; {catalogue.held_in(name)} should be in it", "the checkpoint lists this file"
            )
        if facts.nbytes is not None and found.st_size != facts.nbytes:
            raise file_error(
                path,
                f"a file of {found.st_size} bytes; {catalogue.held_in(name)} should be in it",
                f"the manifest says {facts.nbytes} bytes",
            )
    if not catalogue.is_closed:
        return
    ends = (catalogue.suffix, f"{catalogue.suffix}.index.json")
    extra = [n for n in names_in(catalogue.folder) if n.endswith(ends) and n not in catalogue.files]
    if extra:
        raise file_error(
            catalogue.folder / extra[0],
            f"a file that was not saved; the folder has {len(extra)} of them",
            "the checkpoint lists all its files",
            "move the file out of the folder",
        )
