"""JSON texts of checkpoints: read under the memory bound, and sealed by the SHA-256 of their own bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn

from meshwright.layout import JsonValue

from .._errors import file_error
from .file_operations import open_bytes
from .memory_budget import LARGEST, Budget

COSTS = {b"{": 240, b"[": 64, b",": 72, b":": 72}
"""Most bytes of memory per occurrence of a JSON character."""
_SEAL = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n}\Z')


def cost_of(data: bytes) -> int:
    """Return an upper bound of the bytes of memory for parsing a JSON text."""
    return 2 * len(data) + sum(cost * data.count(character) for character, cost in COSTS.items())


def is_within_bound(data: bytes) -> bool:
    """True if a text is within the bound for any description, whatever files are beside it."""
    return cost_of(data) <= LARGEST


def parse_json(data: bytes, path: Path, budget: Budget, what: str = "JSON") -> JsonValue:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is no JSON, or nested too deeply.
        CheckpointFileError: it exceeds the memory bound.
    """
    budget.spend(cost_of(data), what)
    try:
        return json.loads(data.decode(), parse_constant=_no_number)
    except RecursionError as error:
        raise ValueError("the text is nested too deeply") from error


def read_whole_file(path: Path, budget: Budget, links: bool = False) -> bytes:
    """Return the bytes of a file that describes a checkpoint. Raises CheckpointFileError for one beyond the bound."""
    with open_bytes(path, links) as file:
        budget.spend(file.size, f"{file.size} bytes of a description")
        return file.read(0, file.size)


def read_json(path: Path, what: str, links: bool = False) -> tuple[JsonValue, bytes]:
    """Return the value and the bytes of a JSON file. Raises CheckpointFileError for any other file."""
    budget = Budget(path)
    data = read_whole_file(path, budget, links)
    try:
        return parse_json(data, path, budget), data
    except (ValueError, RecursionError) as error:
        raise file_error(path, what, str(error)) from error


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def sealed(content: Mapping[str, Any]) -> bytes:
    """Return the text of an object, with the SHA-256 of all bytes before it as its last field."""
    body = json.dumps(content, allow_nan=False, indent=1)[:-2].encode()
    return body + f',\n "sha256": "{sha256(body).hexdigest()}"\n}}'.encode()


def has_seal(data: bytes) -> bool:
    """True if the bytes end with the seal that `sealed` writes, and it is right."""
    found = _SEAL.search(data, max(len(data) - 100, 0))
    return found is not None and sha256(memoryview(data)[: found.start()]).hexdigest().encode() == found[1]
