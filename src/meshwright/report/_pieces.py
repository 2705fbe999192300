"""Split a tensor into pieces on a mesh: the segments of each dim, and the ranks that hold each piece."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from meshwright.layout import Product, Range, Spec, axes_of, cut, expand_products

MOST_RUNS = 16
"""A product dim with more segments is drawn as its factors."""
Place = Mapping[str, int]
"""Axis → index along it."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A range of one dim, and its indices on the axes that shard the dim."""

    start: int
    length: int
    at: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        return f"{self.start}:{self.start + self.length}"


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces of a tensor: `segments[d]` are the nonempty segments of dim d (or of a factor), in order."""

    spec: Spec
    names: tuple[str, ...]
    segments: tuple[tuple[Segment, ...], ...]
    empty: tuple[str, ...]

    @staticmethod
    def of(spec: Spec) -> Pieces:
        """Return the pieces of a tensor; symbolic sizes count by their hint."""
        spec = spec.concrete
        names = [f"dim {d}" for d in range(spec.ndim)]
        shape, layout = tuple(spec.shape), spec.layout
        if any(isinstance(d, Product) and _runs(d, spec.mesh.sizes) > MOST_RUNS for d in layout.dims):
            names = [
                f"dim {d}" if not isinstance(dim, Product) else f"dim {d}, factor {i}"
                for d, dim in enumerate(layout.dims)
                for i in range(len(dim.factors) if isinstance(dim, Product) else 1)
            ]
            shape, layout = expand_products(shape, layout)
        every = [list(_segments(n, dim, spec.mesh.sizes)) for n, dim in zip(shape, layout.dims, strict=True)]
        empty = [
            f"{name}: nothing at {', '.join(f'{axis} {i}' for axis, i in s.at)}"
            for name, found in zip(names, every, strict=True)
            for s in found
            if not s.length and s.at
        ]
        held = tuple(tuple(sorted((s for s in found if s.length), key=lambda s: s.start)) for found in every)
        return Pieces(spec, tuple(names), held, tuple(dict.fromkeys(empty)))

    @property
    def cut(self) -> tuple[int, ...]:
        """Return the dims that have more than one segment."""
        return tuple(d for d, found in enumerate(self.segments) if len(found) > 1)

    def holders(self, chosen: Sequence[Segment]) -> list[tuple[int, ...]]:
        """Return the holders of the piece of one segment per dim; a tuple of ranks holds the terms of one value."""
        fixed = {axis: i for segment in chosen for axis, i in segment.at}
        mesh, layout = self.spec.mesh, self.spec.layout
        terms = [a for a in mesh.dim_names if a in layout.partial_axes]
        others = [a for a in mesh.dim_names if a not in fixed and a not in terms]
        return [
            tuple(self._rank({**fixed, **whole, **term}) for term in _places(terms, mesh.sizes))
            for whole in _places(others, mesh.sizes)
        ]

    def _rank(self, at: Place) -> int:
        mesh = self.spec.mesh
        return int(mesh.mesh[tuple(at[a] for a in mesh.dim_names)])


def _places(axes: Sequence[str], sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    for at in product(*(range(sizes[a]) for a in axes)):
        yield dict(zip(axes, at, strict=True))


def _runs(dim: Product, sizes: Mapping[str, int]) -> int:
    """Return the number of segments of the flat dim."""
    last = max((i for i, (_, axes) in enumerate(dim.factors) if axes), default=0)
    outer = prod(n for n, _ in dim.factors[:last])
    return outer * prod(sizes[a] for a in dim.factors[last][1])


def _segments(size: int, dim: object, sizes: Mapping[str, int]) -> Iterator[Segment]:
    """Yield every segment of one dim, empty ones included."""
    if not isinstance(dim, Product):
        axes: tuple[str, ...] = dim if isinstance(dim, tuple) else ()
        for at in _places(axes, sizes):
            start, length = cut(size, axes, sizes, at)
            yield Segment(start, length, tuple(at.items()))
        return
    last = max((i for i, (_, axes) in enumerate(dim.factors) if axes), default=0)
    inner = prod(n for n, _ in dim.factors[last + 1 :])
    for at in _places(axes_of(dim), sizes):
        held = [cut(n, axes, sizes, at) for n, axes in dim.factors[: last + 1]]
        for start, length in _stretches(held, [n for n, _ in dim.factors[: last + 1]]):
            yield Segment(start * inner, length * inner, tuple(at.items()))


def _stretches(held: Sequence[Range], sizes: Sequence[int]) -> Iterator[Range]:
    """Yield the runs of the flat index in which all but the last factor are constant."""
    *outer, (start, length) = held
    for index in product(*(range(begin, begin + count) for begin, count in outer)):
        flat = 0
        for i, n in zip(index, sizes, strict=False):
            flat = flat * n + i
        yield flat * sizes[-1] + start, length
