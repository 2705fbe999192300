"""Product dims: writing two layouts of one dim over the same factors.

A dim cut as `3 * 512@tp` on one side and as a plain `1536` on the other is a tensor of two dims, 3 and 512, on both;
there every rank holds a box, and all that is known about boxes holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from math import prod

from meshwright.layout import Dim, Layout, Product, Range, Spec, axes_of, cut

Factors = tuple[tuple[int, tuple[str, ...]], ...]


def common_factors(src: Spec, dst: Spec) -> tuple[Spec, Spec] | None:
    """Both specs over factors that suit both; None when some dim has no such factors."""
    a, b = _Expanded(src), _Expanded(dst)
    for size, x, y in zip(src.shape, src.layout.dims, dst.layout.dims, strict=True):
        found = _common(size, x, y, a.spec.mesh.sizes, b.spec.mesh.sizes)
        if found is None:
            return None
        a.add(found[0])
        b.add(found[1])
    return a.done(), b.done()


def bridge(src: Spec, dst: Spec) -> Spec:
    """The layout of `src` with every dim whole that has no factors in common with `dst`."""
    sizes = src.mesh.sizes, dst.mesh.sizes
    pairs = zip(src.shape, src.layout.dims, dst.layout.dims, strict=True)
    dims = [x if _common(n, x, y, *sizes) is not None else () for n, x, y in pairs]
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


def _common(
    size: int, a: Dim, b: Dim, a_sizes: Mapping[str, int], b_sizes: Mapping[str, int]
) -> tuple[Factors, Factors] | None:
    x, y = _factors(size, a), _factors(size, b)
    if [n for n, _ in x] == [n for n, _ in y]:
        return x, y
    if not size:
        return ((0, axes_of(a)),), ((0, axes_of(b)),)
    ends = sorted(_ends(x) | _ends(y))
    if any(low and high % low for low, high in pairwise(ends)):
        return None
    left, right = _refine(x, ends, a_sizes), _refine(y, ends, b_sizes)
    return None if left is None or right is None else (left, right)


def _factors(size: int, dim: Dim) -> Factors:
    """The factors of a dim; those that nothing cuts are one with their uncut neighbour."""
    if not isinstance(dim, Product):
        return ((size, dim),)
    made: list[tuple[int, tuple[str, ...]]] = []
    for n, axes in dim.factors:
        if made and not axes and not made[-1][1]:
            made[-1] = (made[-1][0] * n, ())
        else:
            made.append((n, axes))
    return tuple(made)


def _ends(factors: Factors) -> set[int]:
    """The stride of every factor, and the whole size: the places where one factor ends and the next begins."""
    return {prod(n for n, _ in factors[at:]) for at in range(len(factors) + 1)}


def _refine(factors: Factors, ends: Sequence[int], sizes: Mapping[str, int]) -> Factors | None:
    """The same dim with a factor for every two neighbouring `ends`; None when a cut runs through one."""
    made: list[tuple[int, tuple[str, ...]]] = []
    for at, (n, axes) in enumerate(factors):
        stride = prod(m for m, _ in factors[at + 1 :])
        inside = sorted((e // stride for e in ends if stride <= e <= stride * n), reverse=True)
        parts = [high // low for high, low in pairwise(inside)] or [n]
        split = _split(parts, axes, sizes)
        if split is None:
            return None
        made += zip(parts, split, strict=True)
    return tuple(made)


def _split(parts: Sequence[int], axes: tuple[str, ...], sizes: Mapping[str, int]) -> list[tuple[str, ...]] | None:
    """The axes of a factor distributed over the `parts` it is split into, so that every rank holds the same."""
    if len(parts) == 1:
        return [axes]
    for count in range(len(axes), -1, -1):
        rest = _split(parts[1:], axes[count:], sizes)
        if rest is not None and _same(parts, [axes[:count], *rest], axes, sizes):
            return [axes[:count], *rest]
    return None


def _same(
    parts: Sequence[int], split: Sequence[tuple[str, ...]], axes: tuple[str, ...], sizes: Mapping[str, int]
) -> bool:
    total = prod(parts)
    for at in product(*(range(sizes[a]) for a in axes)):
        where = dict(zip(axes, at, strict=True))
        start, length = cut(total, axes, sizes, where)
        found = _run([cut(n, cuts, sizes, where) for n, cuts in zip(parts, split, strict=True)], parts)
        if found is None or found[1] != length or (length and found[0] != start):
            return False
    return True


def _run(ranges: Sequence[Range], parts: Sequence[int]) -> Range | None:
    """The one run of elements that a box over the factors is, or None when it is several."""
    start, length, stride, whole = 0, 1, 1, True
    for (begin, n), size in zip(reversed(ranges), reversed(parts), strict=True):
        if not whole and n > 1:
            return None
        start += begin * stride
        length *= n
        stride *= size
        whole = whole and n == size
    return start, length
