"""Checksums for formats that have none, in an additional file; they are checked if the file exists.

    {"kind", "format",
     "files": {file: {"bytes", "sha256", "ranges": [[name of a tensor, first byte, bytes, CRC-32], …]}},
     "sha256": of the bytes of the text before it}

Other programs do not know this file, and a folder without it is read without checks. The description of a checkpoint
that was saved with checksums says so, and a load without them warns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from meshwright.layout import JsonValue

from .._errors import CheckpointFileError, file_error
from ..contents.catalogue import ByteRange, Catalogue, FileFacts, file_name
from ..files.file_operations import open_bytes, status
from ..files.json_text import has_seal, read_json, sealed
from ..files.safetensors_header import is_count
from .manifest import facts_of
from .safetensors_file import digest_of

CHECKSUMS, KIND, FORMAT = "meshwright.checksums.json", "meshwright checksums", 1
PROMISE = "checksums"
"""The entry of a description that was saved with checksums; its value is the name of their file."""
C = TypeVar("C", bound=Catalogue)


def checksums_text(files: Mapping[str, FileFacts]) -> bytes:
    """Return the text of the file."""
    return sealed({"kind": KIND, "format": FORMAT, "files": facts_json(files)})


def facts_json(files: Mapping[str, FileFacts]) -> dict[str, Any]:
    """Return the facts about files, as JSON."""
    return {
        name: {"bytes": f.nbytes, "sha256": f.sha256, "ranges": [[r.name, r.at, r.nbytes, r.crc32] for r in f.ranges]}
        for name, f in sorted(files.items())
    }


def file_facts_from_json(folder: Path, told: Mapping[str, Any]) -> dict[str, FileFacts]:
    """Return the facts about files in a folder from JSON of `facts_json`. Raises an error for anything else."""
    return {file_name(folder, name): _facts(facts) for name, facts in told.items()}


def facts_of_bytes(data: bytes) -> FileFacts:
    """Return the facts about a file with these bytes."""
    return FileFacts(len(data), sha256(data).hexdigest())


def checksums_in(folder: Path) -> dict[str, FileFacts]:
    """Return the checksums of a checkpoint's additional file, or none. Raises CheckpointFileError if it was changed."""
    path = folder / CHECKSUMS
    if status(path) is None:
        return {}
    content, data = read_json(path, "text that is not JSON, or is truncated")
    if not has_seal(data):
        raise file_error(path, "a SHA-256 that differs from the recorded one", "the checksums were changed", _FIX)
    try:
        if (content["kind"], content["format"]) != (KIND, FORMAT):
            raise ValueError(f"the kind is {str(content['kind'])[:80]} and the format is {str(content['format'])[:80]}")
        return file_facts_from_json(folder, content["files"])
    except CheckpointFileError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise file_error(path, "checksums in an unknown form", str(error), _FIX) from error


def check_description(folder: Path, name: str, known: Mapping[str, FileFacts], links: bool = False) -> None:
    """Raise CheckpointFileError if the file that describes a checkpoint was changed."""
    said = known.get(name)
    if said is None:
        return
    with open_bytes(folder / name, links) as file:
        size = file.size
    if size != said.nbytes or digest_of(folder / name, links).sha256 != said.sha256:
        raise file_error(
            folder / name,
            f"a file of {size} bytes whose size or SHA-256 differs",
            f"{CHECKSUMS} records {said.nbytes} bytes, {said.sha256}",
            _FIX,
        )


def with_checksums(catalogue: C, known: Mapping[str, FileFacts]) -> C:
    """Return a catalogue with the known checksums. Raises CheckpointFileError for a file without one."""
    if not known:
        return catalogue
    if strange := sorted(catalogue.files.keys() - known.keys()):
        raise file_error(
            catalogue.folder / strange[0],
            f"a file that {CHECKSUMS} does not list",
            "the checksums are those of another checkpoint",
            _FIX,
        )
    return replace(catalogue, files=known)


def promise_in(values: Iterable[object]) -> dict[str, Any]:
    """Return the entry for a description with these values: that there are checksums, or nothing."""
    return {PROMISE: CHECKSUMS} if CHECKSUMS in values else {}


def missing_checksums(catalogue: Catalogue) -> CheckpointFileError | None:
    """Return the error for a checkpoint that was saved with checksums and has none; None for any other."""
    has_some = any(facts.sha256 is not None for facts in catalogue.files.values())
    if PROMISE not in catalogue.about or has_some:
        return None
    return file_error(
        catalogue.folder / CHECKSUMS,
        "no checksums for these files",
        "the checkpoint was saved with checksums, and without them a changed byte is not noticed",
        f"copy {CHECKSUMS} from where the checkpoint was saved, or save the state again",
    )


def _facts(told: JsonValue) -> FileFacts:
    facts = facts_of(told)
    ranges: list[ByteRange] = []
    for name, *numbers in told["ranges"]:
        if not isinstance(name, str) or len(numbers) != 3 or not all(is_count(n) for n in numbers):
            raise ValueError(f"an invalid range: {str([name, *numbers])[:80]}")
        ranges.append(ByteRange(name, *numbers))
    return replace(facts, ranges=tuple(ranges))


_FIX = f"use another copy, or remove {CHECKSUMS} if the files are right"
