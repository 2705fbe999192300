"""Common factors of product dims: two layouts of one dim are written over the same factors.

A dim sharded as `3 * 512@tp` on one side and a plain `1536` on the other is treated as two dims, 3 and 512, on both.
Then every rank holds a box, and the algorithms for boxes apply.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from math import prod

from meshwright.layout import Dim, Factors, Layout, Range, Spec, axes_of, cut, factors_of


def common_factors(src: Spec, dst: Spec) -> tuple[Spec, Spec] | None:
    """Return both specs with their dims expanded to common factors; None if some dim has no common factors."""
    a, b = _Expanded(src), _Expanded(dst)
    for size, x, y in zip(src.shape, src.layout.dims, dst.layout.dims, strict=True):
        found = _common_factors(size, x, y, a.spec.mesh.sizes, b.spec.mesh.sizes)
        if found is None:
            return None
        a.add(found[0])
        b.add(found[1])
    return a.done(), b.done()


def bridge(src: Spec, dst: Spec) -> Spec:
    """Return `src` with every dim whole that has no common factors with `dst`."""
    sizes = src.mesh.sizes, dst.mesh.sizes
    pairs = zip(src.shape, src.layout.dims, dst.layout.dims, strict=True)
    dims = [x if _common_factors(n, x, y, *sizes) is not None else () for n, x, y in pairs]
    cut_axes = {a for d in dims for a in axes_of(d)}
    kept = tuple(a for a in src.layout.varying if a not in cut_axes)
    return src.with_layout(Layout(tuple(dims), src.layout.partial, kept))


class _Expanded:
    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.shape: list[int] = []
        self.dims: list[tuple[str, ...]] = []

    def add(self, factors: Factors) -> None:
        self.shape += [n for n, _ in factors]
        self.dims += [axes for _, axes in factors]

    def done(self) -> Spec:
        x = self.spec
        return Spec(x.mesh, Layout(tuple(self.dims), x.layout.partial, x.layout.varying), self.shape, x.dtype)


def _common_factors(
    size: int, a: Dim, b: Dim, a_sizes: Mapping[str, int], b_sizes: Mapping[str, int]
) -> tuple[Factors, Factors] | None:
    x, y = _merged_factors(size, a), _merged_factors(size, b)
    if [n for n, _ in x] == [n for n, _ in y]:
        return x, y
    if not size:
        return ((0, axes_of(a)),), ((0, axes_of(b)),)
    ends = sorted(_ends(x) | _ends(y))
    if any(low and high % low for low, high in pairwise(ends)):
        return None
    left, right = _refine(x, ends, a_sizes), _refine(y, ends, b_sizes)
    return None if left is None or right is None else (left, right)


def _merged_factors(size: int, dim: Dim) -> Factors:
    """Return the factors of a dim; adjacent unsharded factors are merged."""
    made: list[tuple[int, tuple[str, ...]]] = []
    for n, axes in factors_of(size, dim):
        if made and not axes and not made[-1][1]:
            made[-1] = (made[-1][0] * n, ())
        else:
            made.append((n, axes))
    return tuple(made)


def _ends(factors: Factors) -> set[int]:
    """Return the stride of every factor, and the whole size."""
    return {prod(n for n, _ in factors[at:]) for at in range(len(factors) + 1)}


def _refine(factors: Factors, ends: Sequence[int], sizes: Mapping[str, int]) -> Factors | None:
    """Return the dim with a factor for every two adjacent `ends`; None if the shards do not fit these factors."""
    made: list[tuple[int, tuple[str, ...]]] = []
    for at, (n, axes) in enumerate(factors):
        stride = prod(m for m, _ in factors[at + 1 :])
        inside = sorted((e // stride for e in ends if stride <= e <= stride * n), reverse=True)
        parts = [high // low for high, low in pairwise(inside)] or [n]
        split = _split_axes(parts, axes, sizes)
        if split is None:
            return None
        made += zip(parts, split, strict=True)
    return tuple(made)


def _split_axes(parts: Sequence[int], axes: tuple[str, ...], sizes: Mapping[str, int]) -> list[tuple[str, ...]] | None:
    """Return the axes of each part of a split factor, so that ranks hold the same elements; None if impossible."""
    if len(parts) == 1:
        return [axes]
    for count in range(len(axes), -1, -1):
        rest = _split_axes(parts[1:], axes[count:], sizes)
        if rest is not None and _holds_same_elements(parts, [axes[:count], *rest], axes, sizes):
            return [axes[:count], *rest]
    return None


def _holds_same_elements(
    parts: Sequence[int], split: Sequence[tuple[str, ...]], axes: tuple[str, ...], sizes: Mapping[str, int]
) -> bool:
    total = prod(parts)
    for at in product(*(range(sizes[a]) for a in axes)):
        where = dict(zip(axes, at, strict=True))
        start, length = cut(total, axes, sizes, where)
        found = _contiguous_range([cut(n, cuts, sizes, where) for n, cuts in zip(parts, split, strict=True)], parts)
        if found is None or found[1] != length or (length and found[0] != start):
            return False
    return True


def _contiguous_range(ranges: Sequence[Range], parts: Sequence[int]) -> Range | None:
    """Return the contiguous range of elements of a box over the factors; None if it is not contiguous."""
    start, length, stride, whole = 0, 1, 1, True
    for (begin, n), size in zip(reversed(ranges), reversed(parts), strict=True):
        if not whole and n > 1:
            return None
        start += begin * stride
        length *= n
        stride *= size
        whole = whole and n == size
    return start, length
