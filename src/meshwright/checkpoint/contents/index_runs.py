"""The elements of a tensor that a part holds, and the intersections of two parts.

A part is, along each dim, one or more runs of indices: several for a product dim, one for all others. So the parts of
any two layouts can be intersected.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from meshwright.layout import Product, Range, Spec

IndexRun = tuple[Range, ...]
"""Start and length of each run of indices along one dim, ascending."""
PartRuns = tuple[IndexRun, ...]
"""The runs along every dim."""
MOST_CELLS = 1 << 20
Overlap = tuple[tuple[slice, ...], tuple[slice, ...]]
"""A box of elements, as slices of one part and as slices of another."""


@lru_cache(maxsize=65536)
def runs_of(spec: Spec, rank: int) -> PartRuns:
    """Return the elements of a tensor that `rank` holds.

    >>> from meshwright.layout import ProcessMesh, parse_spec
    >>> runs_of(parse_spec("f32[3 * 4@tp, 5]", ProcessMesh([0, 1], ["tp"])), 1)
    (((2, 2), (6, 2), (10, 2)), ((0, 5),))
    """
    ranges = iter(spec.local_ranges(rank))
    found: list[IndexRun] = []
    for dim in spec.layout.dims:
        sizes = [size for size, _ in dim.factors] if isinstance(dim, Product) else [1]
        found.append(_joined(sizes, [next(ranges) for _ in sizes]))
    return tuple(found)


def full_runs(shape: Sequence[int]) -> PartRuns:
    """Return the runs of all elements of a tensor."""
    return tuple(((0, n),) for n in shape)


def _joined(sizes: Sequence[int], ranges: Sequence[Range]) -> IndexRun:
    """Return the runs along a dim whose factors, outermost first, have these sizes and are held in these ranges."""
    found: list[Range] = [(0, 1)]
    for size, (start, length) in zip(sizes, ranges, strict=True):
        if len(sizes) == 1:
            return ((start, length),)
        spread = [(at * size + start, length) for begin, many in found for at in range(begin, begin + many)]
        found = _glued(spread)
    return tuple(found)


def _glued(ranges: Sequence[Range]) -> list[Range]:
    """Return the same indices, with adjacent runs joined and empty ones removed."""
    found: list[Range] = []
    for start, length in ranges:
        if found and sum(found[-1]) == start:
            found[-1] = (found[-1][0], found[-1][1] + length)
        elif length:
            found.append((start, length))
    return found or [(0, 0)]


def shape_of(runs: PartRuns) -> tuple[int, ...]:
    """Return the shape of the part.

    >>> shape_of((((2, 2), (6, 2)), ((0, 5),)))
    (4, 5)
    """
    return tuple(sum(length for _, length in run) for run in runs)


def volume(runs: PartRuns) -> int:
    """Return the number of elements."""
    return prod(shape_of(runs))


def are_whole(shape: Sequence[int], parts: Sequence[PartRuns]) -> bool:
    """True if every element of a tensor is in exactly one of the parts.

    The edges of the parts divide the tensor into cells. Raises ValueError if there are more than a million, or than
    64 for each part.

    >>> are_whole((4,), [(((0, 2),),), (((2, 2),),)]), are_whole((4,), [(((0, 3),),), (((2, 2),),)])
    (True, False)
    """
    if any(len(part) != len(shape) for part in parts):
        return False
    parts = [part for part in parts if volume(part)]
    edges = _cell_edges(shape, parts)
    if any(found[0] < 0 or found[-1] > n for found, n in zip(edges, shape, strict=True)):
        return False
    cells = [len(found) - 1 for found in edges]
    if prod(cells) > max(MOST_CELLS, 64 * len(parts)):
        raise ValueError(
            f"a tensor of shape {tuple(shape)} in {len(parts)} parts, whose edges make {prod(cells)} cells"
        )
    return bool((_parts_by_cell(edges, parts) == 1).all())


def _cell_edges(shape: Sequence[int], parts: Sequence[PartRuns]) -> list[list[int]]:
    """Return, for each dim, the ascending indices at which a part or the tensor begins or ends."""
    found: list[list[int]] = []
    for dim, size in enumerate(shape):
        edges = {0, size}
        for part in parts:
            for start, length in part[dim]:
                edges.update((start, start + length))
        found.append(sorted(edges))
    return found


def _parts_by_cell(edges: Sequence[Sequence[int]], parts: Sequence[PartRuns]) -> NDArray[np.int32]:
    """Return the number of parts that hold each cell between the edges."""
    positions = [{edge: at for at, edge in enumerate(found)} for found in edges]
    count = np.zeros([len(found) - 1 for found in edges], dtype=np.int32)
    for part in parts:
        for box in product(*part):
            runs = zip(positions, box, strict=True)
            count[tuple(slice(at[start], at[start + length]) for at, (start, length) in runs)] += 1
    return count


def overlaps(one: PartRuns, other: PartRuns) -> Iterator[Overlap]:
    """Yield the boxes that two parts share, as slices of each.

    >>> list(overlaps((((2, 2), (6, 2)),), (((0, 7),),)))
    [((slice(0, 2, None),), (slice(2, 4, None),)), ((slice(2, 3, None),), (slice(6, 7, None),))]
    """
    dims = [list(_overlap(a, b)) for a, b in zip(one, other, strict=True)]
    for box in product(*dims):
        yield tuple(a for a, _ in box), tuple(b for _, b in box)


def _overlap(one: IndexRun, other: IndexRun) -> Iterator[tuple[slice, slice]]:
    placed = list(_placed(other))
    for start, end, at in _placed(one):
        for begin, stop, there in placed:
            low, high = max(start, begin), min(end, stop)
            if low < high:
                yield slice(low - start + at, high - start + at), slice(low - begin + there, high - begin + there)


def _placed(run: IndexRun) -> Iterator[tuple[int, int, int]]:
    """Yield the start and the end of each run, and the position of its start in the part."""
    at = 0
    for start, length in run:
        yield start, start + length, at
        at += length
