"""A spec: what a distributed tensor is, all but its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch

from ._errors import LayoutError
from ._layout import Layout, Product, axes_of, placements_of
from ._local import Range, cut, local_ranges, local_shape
from ._mesh import ProcessMesh
from ._placement import Placement
from ._size import hint, identity
from ._text import parse_sized, write_dims, write_dtype


class Spec:
    """Mesh, layout, global shape and dtype of a tensor; immutable, and one object for one content.

    Being one object makes comparing specs an identity test, which eager dispatch lives on.

    Raises LayoutError when the layout does not fit the shape or names an axis that the mesh lacks.
    """

    __slots__ = ("__weakref__", "_dual", "_shapes", "dtype", "layout", "mesh", "shape")
    _known: ClassVar[WeakValueDictionary[Any, Spec]] = WeakValueDictionary()

    mesh: ProcessMesh
    layout: Layout
    shape: torch.Size
    dtype: torch.dtype
    _shapes: dict[int, tuple[int, ...]]
    _dual: Spec | None

    def __new__(cls, mesh: ProcessMesh, layout: Layout, shape: Sequence[int], dtype: torch.dtype) -> Spec:
        shape = tuple(shape)
        key = (mesh, layout, shape if _is_plain(shape) else tuple(map(identity, shape)), dtype)
        found = cls._known.get(key)
        if found is None:
            _check(mesh, layout, shape)
            found = object.__new__(cls)
            found.mesh, found.layout, found.shape, found.dtype = mesh, layout, torch.Size(shape), dtype
            found._shapes, found._dual = {}, None
            cls._known[key] = found
        return found

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def placements(self) -> tuple[Placement, ...]:
        return placements_of(self.layout, self.mesh)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor; symbolic sizes count by their hint."""
        return prod(map(hint, self.shape)) * self.dtype.itemsize

    @property
    def is_symbolic(self) -> bool:
        """True when some size is symbolic."""
        return not _is_plain(self.shape)

    @property
    def concrete(self) -> Spec:
        """The spec with the hints of symbolic sizes in their place."""
        return self if _is_plain(self.shape) else Spec(self.mesh, self.layout, list(map(hint, self.shape)), self.dtype)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of what `rank` holds; a rank outside the mesh holds nothing, written as a leading 0."""
        found = self._shapes.get(rank)
        if found is None:
            found = self._shapes[rank] = self._local_shape(rank)
        return found

    def _local_shape(self, rank: int) -> tuple[int, ...]:
        if rank not in self.mesh:
            return (0, *self.shape[1:]) if self.shape else (0,)
        return local_shape(self.shape, self.layout, self.mesh.sizes, self.mesh.coordinate(rank))

    def local_ranges(self, rank: int) -> tuple[Range, ...]:
        """Start and length of what `rank` holds along every dim (every factor of a product dim)."""
        return local_ranges(self.shape, self.layout, self.mesh.sizes, self.mesh.coordinate(rank))

    def offset(self, rank: int, dim: int) -> int:
        """First index along `dim` that `rank` holds."""
        axes = self.layout.dims[dim]
        if isinstance(axes, Product):
            raise LayoutError(
                f"the offset of rank {rank} along dim {dim}",
                repr(axes),
                "a product dim is held in several runs",
                "local_ranges(rank), which lists every factor",
            )
        return cut(self.shape[dim], axes, self.mesh.sizes, self.mesh.coordinate(rank))[0]

    def of_part(self, shape: Sequence[int]) -> Spec:
        """The spec without symbolic sizes of which a part has this shape; symbolic dims have equal parts."""
        if not self.is_symbolic:
            return self
        dims = zip(self.shape, shape, self.layout.dims, strict=True)
        sizes = [n if isinstance(n, int) else m * prod(self.mesh.sizes[a] for a in axes_of(d)) for n, m, d in dims]  # pyright: ignore[reportUnnecessaryIsInstance] - symbolic
        return Spec(self.mesh, self.layout, sizes, self.dtype)

    def with_layout(self, layout: Layout) -> Spec:
        return Spec(self.mesh, layout, self.shape, self.dtype)

    def with_dtype(self, dtype: torch.dtype) -> Spec:
        return self if dtype is self.dtype else Spec(self.mesh, self.layout, self.shape, dtype)

    def dual(self) -> Spec:
        """The spec of the gradient."""
        if self._dual is None:
            self._dual = self.with_layout(self.layout.dual())
        return self._dual

    def __repr__(self) -> str:
        return write_dtype(self.dtype) + write_dims(self.shape, self.layout)

    def __deepcopy__(self, memo: dict[int, Any]) -> Spec:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Spec, (self.mesh, self.layout, tuple(self.shape), self.dtype)


def parse_spec(text: str, mesh: ProcessMesh) -> Spec:
    """The spec written as `f32[8@dp, 1024] +tp`, on `mesh`.

    Raises LayoutError for text that is not a spec, naming the place.
    """
    dtype, shape, layout = parse_sized(text)
    return Spec(mesh, layout, shape, dtype)


def _is_plain(shape: tuple[Any, ...]) -> bool:
    return all(type(n) is int for n in shape)


def _check(mesh: ProcessMesh, layout: Layout, shape: tuple[int, ...]) -> None:
    if layout.ndim != len(shape):
        raise LayoutError(
            f"layout {layout}",
            f"shape {shape}",
            f"the layout has {layout.ndim} dims, the shape {len(shape)}",
            "one entry per tensor dim",
        )
    unknown = [a for a in layout.axes if a not in mesh.sizes]
    if unknown:
        raise LayoutError(
            f"layout {layout}", str(mesh), f"the mesh has no axis {unknown[0]!r}", f"one of {', '.join(mesh.dim_names)}"
        )
    for n, dim in zip(shape, layout.dims, strict=True):
        if isinstance(dim, Product) and dim.size != n:
            raise LayoutError(f"dim {dim}", f"size {n}", f"the factors make {dim.size}", f"factors that make {n}")
