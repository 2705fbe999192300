"""Local shapes and offsets of the part of a tensor that a rank holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from ._layout import Dim, Layout, Product, factors_of

Range = tuple[int, int]
"""Start and length of a shard along a dim."""


def chunk(size: int, parts: int, at: int) -> Range:
    """Return shard `at` of `size` elements in `parts` shards of ceil(size / parts); the last ones are shorter or empty.

    >>> [chunk(5, 4, i) for i in range(4)]
    [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    if not isinstance(size, int) and size % parts == 0:  # pyright: ignore[reportUnnecessaryIsInstance] - symbolic
        return at * (size // parts), size // parts
    piece = -(-size // parts)
    start = min(at * piece, size)
    return start, min(piece, size - start)


def cut(size: int, axes: Sequence[str], sizes: Mapping[str, int], at: Mapping[str, int]) -> Range:
    """Return the shard of a dim on the rank with coordinate `at`, if `axes` shard the dim, outermost first."""
    start = 0
    for axis in axes:
        begin, size = chunk(size, sizes[axis], at[axis])
        start += begin
    return start, size


def local_length(size: int, dim: Dim, sizes: Mapping[str, int], at: Mapping[str, int]) -> int:
    """Return the local length of a dim."""
    if isinstance(dim, Product):
        return prod(cut(n, axes, sizes, at)[1] for n, axes in dim.factors)
    return cut(size, dim, sizes, at)[1] if dim else size


def local_shape(
    shape: Sequence[int], layout: Layout, sizes: Mapping[str, int], at: Mapping[str, int]
) -> tuple[int, ...]:
    """Return the local shape on the rank with coordinate `at`."""
    return tuple(local_length(n, d, sizes, at) for n, d in zip(shape, layout.dims, strict=True))


def expand_products(shape: Sequence[int], layout: Layout) -> tuple[tuple[int, ...], Layout]:
    """Return shape and layout with every product dim replaced by its factors.

    >>> expand_products((12, 5), Layout((Product(((3, ()), (4, ("tp",)))), ())))
    ((3, 4, 5), [:, @tp, :])
    """
    sizes: list[int] = []
    dims: list[Dim] = []
    for n, dim in zip(shape, layout.dims, strict=True):
        factors = factors_of(n, dim)
        sizes += [size for size, _ in factors]
        dims += [axes for _, axes in factors]
    return tuple(sizes), Layout(tuple(dims), layout.partial, layout.varying)


def local_ranges(
    shape: Sequence[int], layout: Layout, sizes: Mapping[str, int], at: Mapping[str, int]
) -> tuple[Range, ...]:
    """Return start and length of the local part along every dim; for product dims, along every factor."""
    if not layout.is_simple:
        shape, layout = expand_products(shape, layout)
    return tuple(
        cut(n, d, sizes, at) if d and not isinstance(d, Product) else (0, n)
        for n, d in zip(shape, layout.dims, strict=True)
    )
