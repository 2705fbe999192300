"""Read an archive of `torch.save` in a part of a file: a zip archive of a pickle and the bytes of its tensors.

The pickle is read by the interpreter of `unpickle.py`. A tensor is read as its position in the file, so boxes of it
can be read without the rest. Archives with compressed members are refused: torch writes none.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from meshwright.layout import TorchValue

from .._errors import CheckpointFileError, file_error
from .box_reader import memory_of, read_box
from .file_operations import CHUNK, OpenBytes
from .json_values import DEEPEST
from .memory_budget import Budget
from .safetensors_header import is_count
from .unpickle import PickledName, checked_key, unpickle_data

_DTYPES = {name: dtype for name in sorted(vars(torch)) if isinstance(dtype := getattr(torch, name), torch.dtype)}
_STORAGES = {
    "Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16,
    "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
    "Bool": torch.bool, "ComplexDouble": torch.complex128, "ComplexFloat": torch.complex64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StorageBytes:
    """The bytes of a storage: first byte in the file, number of bytes, and the CRC-32 in the archive."""

    at: int
    nbytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of an archive; shape, strides and offset count elements of its dtype."""

    storage: StorageBytes
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def extent(self) -> int:
        """Return the number of elements from the first to the last one in memory."""
        return 0 if 0 in self.shape else 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))

    def check(self, file: OpenBytes) -> None:
        """Raise CheckpointFileError if the bytes do not have the CRC-32 of the archive, if it has one."""
        found = 0
        for at in range(0, self.storage.nbytes, CHUNK):
            part = file.read(self.storage.at + at, min(CHUNK, self.storage.nbytes - at))
            found = zlib.crc32(part, found)
        if self.storage.crc32 and found != self.storage.crc32:
            raise file_error(
                file.path,
                f"CRC-32 {found:#010x} of a tensor's bytes",
                f"the archive says {self.storage.crc32:#010x}: the bytes were changed",
            )

    def read(self, file: OpenBytes, box: Sequence[slice] | None = None) -> Tensor:
        """Return a box of the tensor, or all of it."""
        box = [slice(0, n) for n in self.shape] if box is None else box
        at = self.storage.at + self.offset * self.dtype.itemsize
        if self.strides == _row_major(self.shape):
            return read_box(file, at, self.shape, self.dtype, box)
        memory = torch.empty(self.extent, dtype=self.dtype, device="cpu")
        file.read_into(at, memory_of(memory))
        return memory.as_strided(self.shape, self.strides)[tuple(box)]


def read_archive(file: OpenBytes, name: str, span: tuple[int, int]) -> TorchValue:
    """Return the value in a part of a file; tensors are SavedTensor. Raises CheckpointFileError for anything else."""
    try:
        if span[0] + span[1] > file.size:
            raise ValueError(f"it should be in bytes {span[0]} to {sum(span)}, and the file has {file.size} bytes")
        return _Archive(file, span).value()
    except CheckpointFileError:
        raise
    except Exception as error:  # a broken archive may raise anything
        why = (str(error) or type(error).__name__).split("\n")[0]
        raise file_error(file.path, f"{name}, which is not data that torch.save writes", why) from error


class _Archive:
    """The members of an archive."""

    def __init__(self, file: OpenBytes, span: tuple[int, int]) -> None:
        self.file, self.start = file, span[0]
        self.budget = Budget(file.path)
        with zipfile.ZipFile(_Part(file, span, self.budget)) as archive:
            self.members = {info.filename.partition("/")[2]: info for info in archive.infolist()}

    def value(self) -> TorchValue:
        order = self.members.get("byteorder")
        if order is not None and self._read(order) != b"little":
            raise ValueError("its numbers have another byte order")
        found = unpickle_data(self._read(self.members["data.pkl"]), self.budget, _NAMES, self._storage)
        return _data(found)

    def _member_bytes(self, info: zipfile.ZipInfo) -> StorageBytes:
        """Return the position of a member's bytes. Raises ValueError if it is compressed or has no header."""
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise ValueError(f"its member {info.filename[:80]} is compressed")
        at = self.start + info.header_offset
        head = self.file.read(at, 30)
        if head[:4] != b"PK\3\4":
            raise ValueError(f"its member {info.filename[:80]} has no header")
        begin = at + 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        return StorageBytes(begin, info.file_size, info.CRC)

    def _read(self, info: zipfile.ZipInfo) -> bytes:
        place = self._member_bytes(info)
        self.budget.spend(place.nbytes, f"the member {info.filename[:80]}")
        data = self.file.read(place.at, place.nbytes)
        if place.crc32 and zlib.crc32(data) != place.crc32:
            raise ValueError(f"its member {info.filename[:80]} does not have the CRC-32 that the archive says")
        return data

    def _storage(self, about: TorchValue) -> tuple[StorageBytes, torch.dtype]:
        """Return the position of a storage's bytes, and the dtype of its elements."""
        kind, dtype, key, _, count = about
        if kind != "storage" or not isinstance(dtype, torch.dtype) or not is_count(count):
            raise ValueError("it refers to an object that is not a storage")
        place = self._member_bytes(self.members[f"data/{key}"])
        if place.nbytes != count * dtype.itemsize:
            raise ValueError(f"a storage of {count} elements of {dtype} has {place.nbytes} bytes")
        return place, dtype


class _Part(io.RawIOBase):
    """A part of a file as a file of its own, from which the list of an archive's members is read."""

    def __init__(self, file: OpenBytes, span: tuple[int, int], budget: Budget) -> None:
        self._file, self._start, self._length = file, *span
        self._at, self._budget = 0, budget

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0, /) -> int:
        at = offset + (0, self._at, self._length)[whence]
        if not 0 <= at <= self._length:
            raise ValueError(f"it points to byte {at}, and it has {self._length} bytes")
        self._at = at
        return at

    def read(self, size: int | None = -1, /) -> bytes:
        left = self._length - self._at
        count = left if size is None or size < 0 else min(size, left)
        self._budget.spend(16 * count, "a list of members")
        data = self._file.read(self._start + self._at, count)
        self._at += count
        return data


def _rebuilt(
    storage: tuple[StorageBytes, torch.dtype],
    offset: TorchValue,
    shape: TorchValue,
    strides: TorchValue,
    *rest: object,
) -> SavedTensor:
    """Return the tensor that `_rebuild_tensor_v2` would create, or `_rebuild_tensor_v3`, which has a dtype."""
    place, dtype = storage
    dtype = next((x for x in rest if isinstance(x, torch.dtype)), dtype)
    tensor = SavedTensor(place, dtype, offset, tuple(shape), tuple(strides))
    numbers = (offset, *tensor.shape, *tensor.strides)
    if len(shape) != len(strides) or len(shape) > 64 or not all(is_count(n) for n in numbers):
        raise ValueError("a tensor has an invalid size, stride or offset")
    if (offset + tensor.extent) * dtype.itemsize > place.nbytes or prod(tensor.shape) > tensor.extent:
        raise ValueError(f"a tensor of shape {tensor.shape} exceeds its storage, or overlaps itself")
    return tensor


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(prod(max(n, 1) for n in shape[at + 1 :]) for at in range(len(shape)))


def _dict(pairs: TorchValue = ()) -> dict[Any, Any]:
    return {checked_key(key): value for key, value in pairs}


def _data(value: TorchValue, depth: int = 0) -> TorchValue:
    """Return `value`. Raises ValueError for anything in it that is no data, or nested too deeply."""
    if depth > DEEPEST:
        raise ValueError(f"it is nested more than {DEEPEST} levels deep")
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    for item in inside:
        _data(item, depth + 1)
    plain = (str, bytes, int, float, complex, type(None), torch.dtype, SavedTensor, dict, list, tuple)
    if not isinstance(value, plain):
        raise ValueError(f"it holds a {type(value).__name__}")
    return value


_NAMES: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): PickledName(_rebuilt),
    ("torch._utils", "_rebuild_tensor_v3"): PickledName(_rebuilt),
    ("torch._utils", "_rebuild_parameter"): PickledName(lambda data, *_: data),
    ("torch", "Size"): PickledName(tuple),
    ("collections", "OrderedDict"): PickledName(_dict),
    ("_codecs", "encode"): PickledName(lambda text, _: text.encode("latin-1")),
    **{(module, "complex"): PickledName(complex) for module in ("builtins", "__builtin__")},
    **{("torch", f"{name}Storage"): dtype for name, dtype in _STORAGES.items()},
    ("torch.storage", "UntypedStorage"): torch.uint8,
    **{("torch", name): dtype for name, dtype in _DTYPES.items()},
}
