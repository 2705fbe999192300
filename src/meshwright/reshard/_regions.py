"""Boxes: the part of a tensor that a rank holds, intersections of parts, and the holders of a part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product
from math import prod

from meshwright.layout import Dim, ProcessMesh, Product, Range, Spec, cut

Box = tuple[Range, ...]
"""Start and length along every dim."""
Cuts = tuple[tuple[str, ...], ...]
"""The axes that shard each dim, outermost first: the dims of a layout without products."""


@lru_cache(maxsize=4096)
def box_of(spec: Spec, rank: int) -> Box:
    """Return the box that `rank` holds; it is empty for a rank outside the mesh."""
    return spec.local_ranges(rank) if rank in spec.mesh else ((0, 0),) * max(spec.ndim, 1)


def volume(box: Box) -> int:
    return prod(length for _, length in box)


def meet(a: Box, b: Box) -> Box:
    """Return the intersection of two boxes; its lengths are never negative.

    >>> meet(((0, 4),), ((2, 9),))
    ((2, 2),)
    """
    both: list[Range] = []
    for (i, m), (j, n) in zip(a, b, strict=True):
        start = max(i, j)
        both.append((start, max(min(i + m, j + n) - start, 0)))
    return tuple(both)


def lacking(need: Spec, held: Spec, rank: int) -> int:
    """Return the number of elements that `rank` holds under `need` and does not hold under `held`."""
    if rank not in need.mesh:
        return 0
    wanted = box_of(need, rank)
    count = volume(wanted)
    return count - volume(meet(wanted, box_of(held, rank))) if count and rank in held.mesh else count


def index(box: Box, origin: Box) -> tuple[slice, ...]:
    """Return the slices of `box` in a local tensor that holds the box `origin`."""
    return tuple([slice(i - o, i - o + n) for (i, n), (o, _) in zip(box, origin, strict=True)])


def plain(dim: Dim) -> tuple[str, ...]:
    """Return the axes of a dim. Raises TypeError for a product."""
    if isinstance(dim, Product):
        raise TypeError(f"{dim!r} is a product of factors; expand it first")
    return dim


def cuts_of(spec: Spec) -> Cuts:
    return tuple(plain(d) for d in spec.layout.dims)


@lru_cache(maxsize=4096)
def _intervals(size: int, axes: tuple[str, ...], counts: tuple[int, ...]) -> tuple[tuple[tuple[int, ...], Range], ...]:
    """Return all non-empty shards of a dim: coordinate along `axes`, and range."""
    sizes = dict(zip(axes, counts, strict=True))
    found = [(at, cut(size, axes, sizes, dict(zip(axes, at, strict=True)))) for at in product(*map(range, counts))]
    return tuple((at, piece) for at, piece in found if piece[1])


def blocks(spec: Spec, box: Box) -> list[tuple[dict[str, int], Box]]:
    """Return the shards of `spec` that intersect `box`: their coordinate, and the intersection."""
    if not volume(box):
        return []
    choices: list[list[tuple[dict[str, int], Range]]] = []
    for size, axes, (start, length) in zip(spec.shape, cuts_of(spec), box, strict=True):
        counts = tuple(spec.mesh.sizes[a] for a in axes)
        choices.append([])
        for at, (begin, n) in _intervals(size, axes, counts):
            low, high = max(begin, start), min(begin + n, start + length)
            if low < high:
                choices[-1].append((dict(zip(axes, at, strict=True)), (low, high - low)))
    found: list[tuple[dict[str, int], Box]] = []
    for parts in product(*choices):
        where: dict[str, int] = {}
        for at, _ in parts:
            where |= at
        found.append((where, tuple([piece for _, piece in parts])))
    return found


def ranks_at(mesh: ProcessMesh, at: Mapping[str, int]) -> tuple[int, ...]:
    """Return the ranks with the coordinates in `at`, in mesh order."""
    where = tuple(at.get(name, slice(None)) for name in mesh.dim_names)
    return tuple(int(r) for r in mesh.mesh[where].reshape(-1))


def widest(spec: Spec, axes: Sequence[str]) -> int | None:
    """Return the best dim to shard over `axes`: one that they divide evenly if possible, then the longest.

    Returns None for a scalar.
    """
    if not spec.ndim:
        return None
    parts = prod(spec.mesh.sizes[a] for a in axes)
    local = spec.local_shape(spec.mesh.process_ids[0])
    return max(range(spec.ndim), key=lambda d: (local[d] % parts == 0, local[d], -d))
