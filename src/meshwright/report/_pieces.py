"""Split a tensor into pieces on a mesh: the segments of each dim, and the ranks that hold each piece."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from meshwright.layout import Dim, Factors, Product, Range, Spec, axes_of, cut, expand_products, factors_of

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
class TensorPieces:
    """The pieces of a tensor: `segments[d]` are the nonempty segments of dim d (or of a factor), in order."""

    spec: Spec
    names: tuple[str, ...]
    segments: tuple[tuple[Segment, ...], ...]
    empty: tuple[str, ...]

    @staticmethod
    def of(spec: Spec) -> TensorPieces:
        """Return the pieces of a tensor; symbolic sizes count by their hint."""
        spec, sizes = spec.concrete, spec.mesh.sizes
        names = [f"dim {d}" for d in range(spec.ndim)]
        shape, layout = tuple(spec.shape), spec.layout
        if any(isinstance(dim, Product) and _segment_count(dim, sizes) > MOST_RUNS for dim in layout.dims):
            names = [name for d, dim in enumerate(layout.dims) for name in _factor_names(d, dim)]
            shape, layout = expand_products(shape, layout)
        every = [list(_segments(n, dim, sizes)) for n, dim in zip(shape, layout.dims, strict=True)]
        empty = [text for name, found in zip(names, every, strict=True) for text in _empty_texts(name, found)]
        return TensorPieces(spec, tuple(names), tuple(map(_nonempty, every)), tuple(dict.fromkeys(empty)))

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


def _factor_names(d: int, dim: Dim) -> list[str]:
    """Return the name of a dim, or the names of its factors."""
    if not isinstance(dim, Product):
        return [f"dim {d}"]
    return [f"dim {d}, factor {i}" for i in range(len(dim.factors))]


def _empty_texts(name: str, segments: Iterable[Segment]) -> Iterator[str]:
    """Yield a text for each index on the axes of a dim where no element is held."""
    for segment in segments:
        if not segment.length and segment.at:
            yield f"{name}: nothing at {', '.join(f'{axis} {i}' for axis, i in segment.at)}"


def _nonempty(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Return the segments that have elements, in the order of their starts."""
    return tuple(sorted((s for s in segments if s.length), key=lambda s: s.start))


def _places(axes: Sequence[str], sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    for at in product(*(range(sizes[a]) for a in axes)):
        yield dict(zip(axes, at, strict=True))


def _segment_count(dim: Product, sizes: Mapping[str, int]) -> int:
    """Return the number of segments of the flat dim."""
    last = _last_cut(dim.factors)
    outer = prod(n for n, _ in dim.factors[:last])
    return outer * prod(sizes[a] for a in dim.factors[last][1])


def _last_cut(factors: Factors) -> int:
    """Return the index of the last factor that axes shard, or 0."""
    return max((i for i, (_, axes) in enumerate(factors) if axes), default=0)


def _segments(size: int, dim: Dim, sizes: Mapping[str, int]) -> Iterator[Segment]:
    """Yield every segment of one dim, empty ones included."""
    factors = factors_of(size, dim)
    behind = _last_cut(factors) + 1
    inner = prod(n for n, _ in factors[behind:])
    for at in _places(axes_of(dim), sizes):
        held = [cut(n, axes, sizes, at) for n, axes in factors[:behind]]
        for start, length in _stretches(held, [n for n, _ in factors[:behind]]):
            yield Segment(start * inner, length * inner, tuple(at.items()))


def _stretches(held: Sequence[Range], sizes: Sequence[int]) -> Iterator[Range]:
    """Yield the runs of the flat index in which all but the last factor are constant."""
    *outer, (start, length) = held
    for index in product(*(range(begin, begin + count) for begin, count in outer)):
        flat = 0
        for i, n in zip(index, sizes, strict=False):
            flat = flat * n + i
        yield flat * sizes[-1] + start, length
