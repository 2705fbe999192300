"""The header of a safetensors file, read and checked field by field.

A file is the length of a header in 8 bytes, the header as JSON (name, dtype, shape and bytes of every tensor), and the
tensors' bytes without gaps.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod

import torch

from meshwright.layout import JsonValue

from .._errors import CheckpointFileError, file_error
from .file_operations import OpenBytes
from .json_text import parse_json
from .memory_budget import Budget

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""dtype → its name in the format."""
DTYPE_OF_NAME = {name: dtype for dtype, name in DTYPES.items()}
LONGEST_HEADER = 100_000_000
"""Most bytes of a header that safetensors reads."""
_KIND = re.compile(r"[A-Z][A-Z0-9_]{0,15}")


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """A tensor of a file: the format's name of its dtype, its shape, and its first byte."""

    kind: str
    shape: tuple[int, ...]
    at: int

    @property
    def dtype(self) -> torch.dtype | None:
        """Return the dtype, or None if torch does not have it."""
        return DTYPE_OF_NAME.get(self.kind)


def read_header(file: OpenBytes) -> tuple[dict[str, HeaderEntry], dict[str, str]]:
    """Return every tensor of a file, and its metadata.

    Raises:
        CheckpointFileError: the file is of another kind, or cut short.
    """
    try:
        return _read(file)
    except CheckpointFileError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        why = str(error) or type(error).__name__
        raise file_error(file.path, "a file that is not safetensors, or is truncated", why) from error


def _read(file: OpenBytes) -> tuple[dict[str, HeaderEntry], dict[str, str]]:
    if file.size < 8:
        raise ValueError(f"it has {file.size} bytes, and at least 8 are needed")
    length = int.from_bytes(file.read(0, 8), "little")
    if length > min(LONGEST_HEADER, file.size - 8):
        raise ValueError(f"it should have a header of {length} bytes, and it has {file.size} bytes")
    fields: JsonValue = parse_json(file.read(8, length), file.path, Budget(file.path), "a header")
    about: JsonValue = fields.pop("__metadata__", {})
    if not all(isinstance(value, str) for value in about.values()):
        raise ValueError("its __metadata__ has values that are not strings")
    found = {name: _stored(name, field) for name, field in fields.items()}
    end = 0
    for name, (stored, stop) in sorted(found.items(), key=lambda item: (item[1][0].at, item[1][1])):
        if stored.at != end:
            raise ValueError(f"tensor {name} begins at byte {stored.at}, and not at {end}")
        end = stop
    if end != file.size - 8 - length:
        raise ValueError(f"its tensors have {end} bytes instead of {file.size - 8 - length}")
    return {name: HeaderEntry(s.kind, s.shape, s.at + 8 + length) for name, (s, _) in found.items()}, about


def _stored(name: str, field: JsonValue) -> tuple[HeaderEntry, int]:
    """Return a tensor, with its first byte counted from the header's end, and the index after its last byte."""
    if set(field) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name} has the fields {', '.join(map(str, field))[:80]}")
    kind, shape, (start, stop) = field["dtype"], field["shape"], field["data_offsets"]
    if not isinstance(kind, str) or not _KIND.fullmatch(kind):
        raise ValueError(f"tensor {name} has the dtype {str(kind)[:80]}")
    if not isinstance(shape, list) or not all(is_count(n) for n in (*shape, start, stop)):
        raise ValueError(f"tensor {name} has an invalid shape or offsets")
    dtype = DTYPE_OF_NAME.get(kind)
    if stop < start or (dtype is not None and stop - start != prod(shape) * dtype.itemsize):
        raise ValueError(f"tensor {name}, {kind} of shape {str(shape)[:80]}, has bytes {start} to {stop}")
    return HeaderEntry(kind, tuple(shape), start), stop


def is_count(value: object) -> bool:
    """True for an integer from 0 on that a file or a tensor can have as a size."""
    return type(value) is int and 0 <= value < 1 << 63
