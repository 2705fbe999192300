"""Read a box of a tensor that is stored in row-major order, without the rest of it if that is faster.

A box is one run of bytes or several. Long runs are read one by one, straight into the result. For short runs, whole
rows are read block by block, and the box is taken from each block.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from .file_operations import CHUNK, OpenBytes

LONG_RUN = 1 << 16
"""Fewest bytes of a run that is read alone."""


def read_box(file: OpenBytes, at: int, shape: Sequence[int], dtype: torch.dtype, box: Sequence[slice]) -> Tensor:
    """Return a box of the tensor whose first element is at byte `at`."""
    out = torch.empty([s.stop - s.start for s in box], dtype=dtype, device="cpu")
    if out.numel():
        _read(file, at, tuple(shape), tuple(box), out)
    return out


def memory_of(x: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without a copy."""
    return x.reshape(-1).view(torch.uint8).numpy().data


def _read(file: OpenBytes, at: int, shape: tuple[int, ...], box: tuple[slice, ...], out: Tensor) -> None:
    """Fill `out`, which is contiguous, with a box that has elements."""
    if not shape:
        file.read_into(at, memory_of(out))
        return
    row = prod(shape[1:]) * out.element_size()
    first = box[0].start
    if _is_whole(shape[1:], box[1:]):
        file.read_into(at + first * row, memory_of(out))
    elif row <= CHUNK and _run_length(shape[1:], box[1:]) * out.element_size() < LONG_RUN:
        _read_rows(file, at, shape, box, out)
    else:
        for n in range(first, box[0].stop):
            _read(file, at + n * row, shape[1:], box[1:], out[n - first])


def _read_rows(file: OpenBytes, at: int, shape: tuple[int, ...], box: tuple[slice, ...], out: Tensor) -> None:
    """Read whole rows, and keep the box of each."""
    row = prod(shape[1:]) * out.element_size()
    step = max(CHUNK // row, 1)
    for start in range(box[0].start, box[0].stop, step):
        stop = min(start + step, box[0].stop)
        rows = torch.empty((stop - start, *shape[1:]), dtype=out.dtype, device="cpu")
        file.read_into(at + start * row, memory_of(rows))
        out[start - box[0].start : stop - box[0].start] = rows[(slice(None), *box[1:])]


def _is_whole(shape: Sequence[int], box: Sequence[slice]) -> bool:
    return all(s.start == 0 and s.stop == n for n, s in zip(shape, box, strict=True))


def _run_length(shape: Sequence[int], box: Sequence[slice]) -> int:
    """Return the number of elements in one run of a box in these inner dims."""
    count = 1
    for n, s in zip(reversed(shape), reversed(box), strict=True):
        count *= s.stop - s.start
        if s.stop - s.start != n:
            break
    return count
