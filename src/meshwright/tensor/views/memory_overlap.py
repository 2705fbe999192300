"""Tensors that share memory: all their elements, or some of them.

Tensors are compared by the bytes of their elements, so that two parts of one flat buffer are apart. Only tensors whose
ranges of bytes overlap are compared by elements: each marks its elements in a map of their common range. The cost is
O(n log n) for n tensors, plus the size of the maps. One unit of a map is the largest number of bytes that divides all
runs, strides and offsets of its tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from ..torch_hooks import FakeTensor, is_dense, no_interception

MOST_UNITS = 2**27
"""The largest map in units, each of 8 bytes; tensors that need a larger map count as sharing elements."""


class _Memory(NamedTuple):
    """The bytes of a tensor's elements; the fields are in sort order."""

    device: str
    start: int
    end: int
    dims: tuple[tuple[int, int], ...]
    """Size and stride in bytes of each dim; the stride is 0 for a dim of size 1."""
    kind: tuple[torch.dtype, bool, bool]
    """The dtype, and the conj and neg bits: tensors of different kinds read the same bytes as different numbers."""
    item: int
    """Bytes of an element."""

    @property
    def runs(self) -> tuple[int, list[tuple[int, int]]]:
        """Bytes of the longest run without gaps, and the sizes and strides of the dims that repeat the run."""
        run, left = self.item, sorted((dim for dim in self.dims if dim[1]), key=lambda dim: dim[1])
        while left and left[0][1] == run:
            run *= left.pop(0)[0]
        return run, left


def shared_memory(tensors: Sequence[Tensor], count: int) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """Return the groups of tensors with the same elements, and the pairs that share only some elements.

    The result holds indices of tensors. Groups and pairs without one of the first `count` tensors are left out. There
    is at most one pair between two groups. A distributed tensor is compared by this rank's part. A tensor without its
    own memory, as on the meta device, shares none.
    """
    found: dict[_Memory, list[int]] = {}
    with no_interception():
        for at, x in enumerate(tensors):
            memory = _memory_of(x)
            if memory is not None:
                found.setdefault(memory, []).append(at)
    groups = [group for group in found.values() if len(group) > 1 and group[0] < count]
    firsts = sorted(((memory, group[0]) for memory, group in found.items()), key=lambda pair: pair[0][:3])
    return groups, [pair for cluster in _overlapping_clusters(firsts) for pair in _sharing_pairs(cluster, count)]


def _memory_of(x: Tensor) -> _Memory | None:
    """Return the memory of a local tensor, or None if it has no elements in memory."""
    if isinstance(x, FakeTensor) or x.is_meta or not is_dense(x) or not x.numel():
        return None
    if not x.untyped_storage().data_ptr():
        return None
    item, start = x.element_size(), x.data_ptr()
    dims = tuple((n, step * item if n > 1 else 0) for n, step in zip(x.shape, x.stride(), strict=True))
    end = start + item + sum((n - 1) * step for n, step in dims)
    return _Memory(str(x.device), start, end, dims, (x.dtype, x.is_conj(), x.is_neg()), item)


def _overlapping_clusters(memories: Sequence[tuple[_Memory, int]]) -> Iterator[list[tuple[_Memory, int]]]:
    """Yield clusters of two or more sorted memories whose ranges of bytes overlap."""
    for _, on_device in groupby(memories, key=lambda pair: pair[0].device):
        cluster, end = list[tuple[_Memory, int]](), 0
        for memory, at in on_device:
            if memory.start >= end:
                if len(cluster) > 1:
                    yield cluster
                cluster = []
            cluster.append((memory, at))
            end = max(end, memory.end)
        if len(cluster) > 1:
            yield cluster


def _sharing_pairs(cluster: Sequence[tuple[_Memory, int]], count: int) -> Iterator[tuple[int, int]]:
    """Return one pair for each tensor that shares an element with an earlier one, which is among the first `count`."""
    first, end = cluster[0][0].start, max(memory.end for memory, _ in cluster)
    unit = gcd(*[distance for memory, _ in cluster for distance in (memory.start - first, *_run_and_strides(memory))])
    units = (end - first) // unit
    if units > MOST_UNITS:
        numbers = sorted(at for _, at in cluster)  # count as shared, without a comparison of elements
        return (pair for pair in pairwise(numbers) if pair[0] < count)
    return _compared_pairs(cluster, count, torch.full((units,), -1, device="cpu"), unit)


def _compared_pairs(
    cluster: Sequence[tuple[_Memory, int]], count: int, owners: Tensor, unit: int
) -> Iterator[tuple[int, int]]:
    """Yield the pairs of `_sharing_pairs`; `owners` is the map of the memory, in units of `unit` bytes."""
    first = cluster[0][0].start
    for memory, at in sorted(cluster, key=lambda pair: pair[1]):
        seen = _elements_in(owners, memory, first, unit)
        other = int(seen.max())
        if other >= 0:
            yield other, at
        if at < count:
            seen.fill_(at)


def _elements_in(owners: Tensor, memory: _Memory, first: int, unit: int) -> Tensor:
    """Return the view of a map that shows the units of a tensor's elements; the map begins at address `first`."""
    run, dims = memory.runs
    shape = (*(n for n, _ in dims), run // unit)
    strides = (*(step // unit for _, step in dims), 1)
    return owners.as_strided(shape, strides, (memory.start - first) // unit)


def _run_and_strides(memory: _Memory) -> list[int]:
    """Return the bytes of a run, and the strides of the dims that repeat it."""
    run, dims = memory.runs
    return [run, *(step for _, step in dims)]
