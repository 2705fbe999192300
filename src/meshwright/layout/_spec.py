"""Specs: all properties of a distributed tensor except its elements."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch

from ._errors import LayoutError
from ._layout import Layout, Product, axes_of, parts_of, placements_of
from ._local import Range, cut, local_ranges, local_shape
from ._mesh import ProcessMesh
from ._placement import Placement
from ._size import hint, identity
from ._strides import Strides, contiguous_strides, dense_strides, is_contiguous, memory_order, strides_like
from ._text import parse_sized, read_strides, write_dims, write_dtype, write_strides


class Spec:
    """Mesh, layout, global shape, dtype and global strides of a tensor; immutable, and one object for one content.

    `strides` are the strides of the whole tensor, or None if it is contiguous. They decide whether a call returns a
    view or a copy, equally on every rank. The local part of a dense tensor has the same order of dims in memory.

    Two specs are equal if they are the same object, so that eager dispatch compares them by identity.

    Raises:
        LayoutError: the layout does not fit the shape, or names an axis that the mesh lacks.
    """

    __slots__ = ("__weakref__", "_dual", "_order", "_shapes", "dtype", "layout", "mesh", "shape", "strides")
    _known: ClassVar[WeakValueDictionary[Any, Spec]] = WeakValueDictionary()

    mesh: ProcessMesh
    layout: Layout
    shape: torch.Size
    dtype: torch.dtype
    strides: Strides | None
    _shapes: dict[int, tuple[int, ...]]
    _dual: Spec | None
    _order: tuple[int, ...] | None

    def __new__(
        cls,
        mesh: ProcessMesh,
        layout: Layout,
        shape: Sequence[int],
        dtype: torch.dtype,
        strides: Sequence[int] | None = None,
    ) -> Spec:
        shape = tuple(shape)
        strides = None if strides is None or is_contiguous(shape, strides) else tuple(strides)
        key = (mesh, layout, _identities(shape), dtype, None if strides is None else _identities(strides))
        found = cls._known.get(key)
        if found is None:
            _check(mesh, layout, shape)
            found = object.__new__(cls)
            found.mesh, found.layout, found.shape, found.dtype = mesh, layout, torch.Size(shape), dtype
            found.strides = strides
            found._order = None if strides is None else memory_order(shape, strides)
            found._shapes, found._dual = {}, None
            cls._known[key] = found
        return found

    @property
    def is_dense(self) -> bool:
        """True if the whole tensor fills one block of memory, in any order of its dims."""
        return self.strides is None or self._order is not None

    @property
    def order(self) -> tuple[int, ...] | None:
        """Dims from the outermost to the innermost in memory; None if the tensor is contiguous or not dense."""
        return self._order

    @property
    def full_strides(self) -> Strides:
        """Strides of the whole tensor, also if it is contiguous."""
        return contiguous_strides(self.shape) if self.strides is None else self.strides

    @property
    def new(self) -> Spec:
        """Spec of `torch.empty_like` of the tensor: the same spec if the tensor is dense, else with dense strides."""
        return self if self.is_dense else self.with_strides(strides_like(self.shape, self.full_strides))

    @property
    def contiguous(self) -> Spec:
        """Spec of a contiguous tensor that is otherwise the same."""
        return self.with_strides(None)

    def local_strides(self, rank: int) -> Strides:
        """Return the strides of the local part of a new tensor with this spec on `rank`."""
        shape, order = self.local_shape(rank), self.new._order
        return contiguous_strides(shape) if order is None else dense_strides(shape, order)

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
        """True if some size is symbolic."""
        return not _is_plain(self.shape)

    @property
    def concrete(self) -> Spec:
        """The spec with symbolic sizes replaced by their hints."""
        if _is_plain(self.shape):
            return self
        strides = None if self.strides is None else list(map(hint, self.strides))
        return Spec(self.mesh, self.layout, list(map(hint, self.shape)), self.dtype, strides)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the local shape of `rank`. For a rank outside the mesh, the first size is 0."""
        found = self._shapes.get(rank)
        if found is None:
            found = self._shapes[rank] = self._local_shape(rank)
        return found

    def _local_shape(self, rank: int) -> tuple[int, ...]:
        if rank not in self.mesh:
            return (0, *self.shape[1:]) if self.shape else ()
        return local_shape(self.shape, self.layout, self.mesh.sizes, self.mesh.coordinate(rank))

    def local_ranges(self, rank: int) -> tuple[Range, ...]:
        """Return start and length of the local part of `rank` along every dim (every factor of a product dim)."""
        return local_ranges(self.shape, self.layout, self.mesh.sizes, self.mesh.coordinate(rank))

    def offset(self, rank: int, dim: int) -> int:
        """Return the first index along `dim` that `rank` holds. Raises LayoutError for a product dim."""
        axes = self.layout.dims[dim]
        if isinstance(axes, Product):
            raise LayoutError(
                f"the offset of rank {rank} along dim {dim}",
                repr(axes),
                "a part of a product dim has several ranges, and no single offset",
                "call local_ranges(rank), which lists every factor",
            )
        return cut(self.shape[dim], axes, self.mesh.sizes, self.mesh.coordinate(rank))[0]

    def of_part(self, shape: Sequence[int]) -> Spec:
        """Return the spec without symbolic sizes for a local tensor of this shape; symbolic dims have equal shards."""
        if not self.is_symbolic:
            return self
        dims = zip(self.shape, shape, self.layout.dims, strict=True)
        sizes = [n if isinstance(n, int) else m * prod(self.mesh.sizes[a] for a in axes_of(d)) for n, m, d in dims]  # pyright: ignore[reportUnnecessaryIsInstance] - symbolic
        return Spec(self.mesh, self.layout, sizes, self.dtype)

    def with_layout(self, layout: Layout) -> Spec:
        """Return the spec of the same tensor in another layout. It is contiguous if a local tensor changes."""
        if layout == self.layout:
            return self
        sizes = self.mesh.sizes
        keeps = self.strides is not None and parts_of(layout, sizes) == parts_of(self.layout, sizes)
        return Spec(self.mesh, layout, self.shape, self.dtype, self.strides if keeps else None)

    def with_dtype(self, dtype: torch.dtype) -> Spec:
        """Return the spec of the same tensor in another dtype."""
        return self if dtype is self.dtype else Spec(self.mesh, self.layout, self.shape, dtype, self.strides)

    def with_strides(self, strides: Sequence[int] | None) -> Spec:
        """Return the spec of the same tensor with other strides."""
        same = strides is None and self.strides is None
        return self if same else Spec(self.mesh, self.layout, self.shape, self.dtype, strides)

    def dual(self) -> Spec:
        """Return the spec of the gradient. A gradient has the strides of its tensor if the tensor is dense."""
        if self._dual is None:
            strides = self.strides if self.is_dense else None
            self._dual = Spec(self.mesh, self.layout.dual(), self.shape, self.dtype, strides)
        return self._dual

    def __repr__(self) -> str:
        return write_dtype(self.dtype) + write_dims(self.shape, self.layout) + write_strides(self.strides)

    def __deepcopy__(self, memo: dict[int, Any]) -> Spec:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Spec, (self.mesh, self.layout, tuple(self.shape), self.dtype, self.strides)


def parse_spec(text: str, mesh: ProcessMesh) -> Spec:
    """Return the spec that a text such as `f32[8@dp, 1024] +tp` describes, on `mesh`.

    If the tensor is not contiguous, its strides come last: `f32[8@dp, 4] strides (1, 8)`.

    Raises:
        LayoutError: the text is not a spec; the message quotes the invalid part.
    """
    text, strides = read_strides(text)
    dtype, shape, layout = parse_sized(text)
    return Spec(mesh, layout, shape, dtype, strides)


def _identities(sizes: tuple[Any, ...]) -> tuple[Any, ...]:
    return sizes if _is_plain(sizes) else tuple(map(identity, sizes))


def _is_plain(shape: tuple[Any, ...]) -> bool:
    return all(type(n) is int for n in shape)


def _check(mesh: ProcessMesh, layout: Layout, shape: tuple[int, ...]) -> None:
    if layout.ndim != len(shape):
        raise LayoutError(
            f"layout {layout}",
            f"shape {shape}",
            f"the layout has {layout.ndim} dims, the shape {len(shape)}",
            "write one entry per tensor dim",
        )
    unknown = [a for a in layout.axes if a not in mesh.sizes]
    if unknown:
        raise LayoutError(
            f"layout {layout}",
            str(mesh),
            f"the mesh has no axis {unknown[0]!r}",
            f"use one of {', '.join(mesh.dim_names)}",
        )
    for n, dim in zip(shape, layout.dims, strict=True):
        if isinstance(dim, Product) and dim.size != n:
            raise LayoutError(
                f"dim {dim}",
                f"size {n}",
                f"the product of the factors is {dim.size}",
                f"use factors whose product is {n}",
            )
