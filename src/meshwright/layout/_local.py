"""Local shapes and offsets: which part of a tensor a rank holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from ._layout import Dim, Layout, Product

Range = tuple[int, int]
"""Where a piece starts, and how long it is."""


def chunk(size: int, parts: int, at: int) -> Range:
    """The piece `at` of `size` elements in `parts` pieces of ceil(size / parts), the last ones shorter or empty.

    >>> [chunk(5, 4, i) for i in range(4)]
    [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    if not isinstance(size, int) and size % parts == 0:  # pyright: ignore[reportUnnecessaryIsInstance] - symbolic
        return at * (size // parts), size // parts
    piece = -(-size // parts)
    start = min(at * piece, size)
    return start, min(piece, size - start)


def cut(size: int, axes: Sequence[str], sizes: Mapping[str, int], at: Mapping[str, int]) -> Range:
    """The piece of one dim that the rank at coordinate `at` holds when `axes` cut it, outermost first."""
    start = 0
    for axis in axes:
        begin, size = chunk(size, sizes[axis], at[axis])
        start += begin
    return start, size


def local_length(size: int, dim: Dim, sizes: Mapping[str, int], at: Mapping[str, int]) -> int:
    """Length of the local part of one dim."""
    if isinstance(dim, Product):
        return prod(cut(n, axes, sizes, at)[1] for n, axes in dim.factors)
    return cut(size, dim, sizes, at)[1] if dim else size


def local_shape(
    shape: Sequence[int], layout: Layout, sizes: Mapping[str, int], at: Mapping[str, int]
) -> tuple[int, ...]:
    """Shape of the part that the rank at coordinate `at` holds."""
    return tuple(local_length(n, d, sizes, at) for n, d in zip(shape, layout.dims, strict=True))


def expand_products(shape: Sequence[int], layout: Layout) -> tuple[tuple[int, ...], Layout]:
    """The same elements with every product dim written out as its factors.

    >>> expand_products((12, 5), Layout((Product(((3, ()), (4, ("tp",)))), ())))
    ((3, 4, 5), [:, @tp, :])
    """
    sizes: list[int] = []
    dims: list[Dim] = []
    for n, dim in zip(shape, layout.dims, strict=True):
        factors = dim.factors if isinstance(dim, Product) else ((n, dim),)
        sizes += [size for size, _ in factors]
        dims += [axes for _, axes in factors]
    return tuple(sizes), Layout(tuple(dims), layout.partial, layout.varying)


def local_ranges(
    shape: Sequence[int], layout: Layout, sizes: Mapping[str, int], at: Mapping[str, int]
) -> tuple[Range, ...]:
    """Start and length of the local part along every dim; for product dims, along every factor."""
    if not layout.is_simple:
        shape, layout = expand_products(shape, layout)
    return tuple(
        cut(n, d, sizes, at) if d and not isinstance(d, Product) else (0, n)
        for n, d in zip(shape, layout.dims, strict=True)
    )
