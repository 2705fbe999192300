"""Layouts: the distribution of a tensor's elements over a mesh, and that of its gradient."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ._errors import LayoutError, PlacementError
from ._mesh import ProcessMesh
from ._placement import Partial, Placement, Replicate, Shard

Factors = tuple[tuple[int, tuple[str, ...]], ...]
"""Size of each factor of a dim, and the axes that shard it, outermost first."""


@dataclass(frozen=True, slots=True)
class Product:
    """A dim that is a product of factors, outermost first; each factor has a size and its own sharding axes.

    Examples are a flattened `(batch, seq)` with seq sharded, and a fused QKV weight.

    >>> Product(((3, ()), (512, ("tp",))))
    3 * 512@tp
    """

    factors: Factors

    def __repr__(self) -> str:
        return " * ".join(f"{n}" + "".join(f"@{a}" for a in axes) for n, axes in self.factors)

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(a for _, axes in self.factors for a in axes)

    @property
    def size(self) -> int:
        total = 1
        for n, _ in self.factors:
            total *= n
        return total


Dim = tuple[str, ...] | Product
"""The axes that shard a tensor dim, outermost first, or a product of factors."""


def factors_of(size: int, dim: Dim) -> Factors:
    """Return the factors of a dim of this size; a dim that is no product is its only factor."""
    return dim.factors if isinstance(dim, Product) else ((size, dim),)


def axes_of(dim: Dim) -> tuple[str, ...]:
    """Return all mesh axes that shard `dim`."""
    return dim.axes if isinstance(dim, Product) else dim


@dataclass(frozen=True, slots=True)
class Layout:
    """Distribution of a tensor's elements over a mesh.

    Each dim lists the mesh axes that shard it, outermost first. `partial` lists the axes whose terms must still be
    joined, with the operation. `varying` lists the axes along which the tensor is replicated but used differently on
    each rank, so that its gradient is a pending sum there. On all other axes the tensor is replicated, invariant.

    >>> Layout((("dp",), (), ("tp", "cp")), partial=(("ep", "sum"),))
    [@dp, :, @tp@cp] +ep

    Raises:
        LayoutError: an axis has two roles.
    """

    dims: tuple[Dim, ...]
    partial: tuple[tuple[str, str], ...] = ()
    varying: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.partial:
            object.__setattr__(self, "partial", tuple(sorted(self.partial)))
        if self.varying:
            object.__setattr__(self, "varying", tuple(sorted(self.varying)))
        axes = [a for d in self.dims for a in axes_of(d)] + [a for a, _ in self.partial] + list(self.varying)
        if len(set(axes)) != len(axes):
            twice = next(a for a in axes if axes.count(a) > 1)
            raise LayoutError(
                f"a layout {self!r}",
                f"axis {twice!r} in two places",
                "an axis has one role in a layout",
                "use each axis once",
            )

    @property
    def ndim(self) -> int:
        return len(self.dims)

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes with a role other than invariant replication."""
        return (*self.cut_axes, *self.partial_axes, *self.varying)

    @property
    def cut_axes(self) -> tuple[str, ...]:
        return tuple(a for d in self.dims for a in axes_of(d))

    @property
    def partial_axes(self) -> tuple[str, ...]:
        return tuple(a for a, _ in self.partial)

    @property
    def is_simple(self) -> bool:
        """True if no dim is a product of factors."""
        return not any(isinstance(d, Product) for d in self.dims)

    @property
    def is_replicated(self) -> bool:
        """True if every rank holds the whole value."""
        return not self.partial and not self.cut_axes

    def on(self, axis: str) -> Placement:
        """Return the placement along `axis`; varying and invariant replication are both `Replicate()`."""
        for at, dim in enumerate(self.dims):
            if axis in axes_of(dim):
                return Shard(at)
        for name, op in self.partial:
            if name == axis:
                return Partial(op)
        return Replicate()

    def dual(self) -> Layout:
        """Return the layout of the gradient: sharding stays, terms become varying replication, and vice versa.

        The gradient of an average, a maximum or a minimum is the sum of the gradients of its terms.

        >>> Layout((("dp",), ()), partial=(("tp", "sum"),), varying=("cp",)).dual()
        [@dp, :] +cp ~tp
        """
        stays = tuple((a, "sum") for a, op in self.partial if op in _SHARING)
        flips = tuple(a for a, op in self.partial if op not in _SHARING)
        return Layout(self.dims, (*((a, "sum") for a in self.varying), *stays), flips)

    def with_varying(self, axes: Iterable[str]) -> Layout:
        """Return the layout with `axes` as its varying axes."""
        return replace(self, varying=tuple(axes))

    def __repr__(self) -> str:
        body = ", ".join(repr(d) if isinstance(d, Product) else "".join(f"@{a}" for a in d) or ":" for d in self.dims)
        return f"[{body}]" + self.marks()

    def marks(self) -> str:
        """Return the partial and varying axes as text, such as ` +ep +cp:max ~dp`."""
        pending = "".join(f" +{a}" + ("" if op == "sum" else f":{op}") for a, op in self.partial)
        return pending + "".join(f" ~{a}" for a in self.varying)


_SHARING = ("avg", "max", "min")
"""Reductions whose gradient is divided among the terms: equally, or among the terms that equal the result."""


def without_trivial_axes(layout: Layout, sizes: Mapping[str, int]) -> Layout:
    """Return the layout without mesh axes of size 1, on which all roles are equal.

    >>> without_trivial_axes(Layout((("dp", "tp"), ()), varying=("cp",)), {"dp": 2, "tp": 1, "cp": 1})
    [@dp, :]
    """

    def real(axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(a for a in axes if sizes[a] > 1)

    dims: list[Dim] = []
    for dim in layout.dims:
        factors = dim.factors if isinstance(dim, Product) else None
        dims.append(real(axes_of(dim)) if factors is None else Product(tuple((n, real(axes)) for n, axes in factors)))
    partial = tuple((a, op) for a, op in layout.partial if sizes[a] > 1)
    return Layout(tuple(dims), partial, real(layout.varying))


def parts_of(layout: Layout, sizes: Mapping[str, int]) -> Layout:
    """Return the layout without trivial and varying axes, which do not change the local tensors."""
    return replace(without_trivial_axes(layout, sizes), varying=())


def replicated(ndim: int) -> Layout:
    """Return the layout of a tensor that is replicated and invariant on all axes."""
    return Layout(((),) * ndim)


def layout_of(placements: Sequence[Placement], ndim: int, mesh: ProcessMesh) -> Layout:
    """Return the layout for a list of placements, one per mesh axis.

    A list shorter than the mesh is padded with `Replicate()`. Negative dims count from the end. Several `Shard` of one
    dim shard it in the order of the mesh axes.

    >>> layout_of([Shard(0), Shard(-1)], 2, ProcessMesh([[0, 1, 2], [3, 4, 5]], ["x", "y"]))
    [@x, @y]

    Raises:
        PlacementError: there are too many placements, or the tensor has no such dim.
    """
    if len(placements) > mesh.ndim:
        raise PlacementError(
            f"placements {list(placements)}",
            f"{mesh} with {mesh.ndim} axes",
            "there is one placement per mesh axis",
            f"pass at most {mesh.ndim} placements",
        )
    dims: list[tuple[str, ...]] = [()] * ndim
    partial: list[tuple[str, str]] = []
    for axis, placement in zip(mesh.dim_names, placements, strict=False):
        if isinstance(placement, Shard):
            at = _dim_at(placement, ndim, axis)
            dims[at] = (*dims[at], axis)
        elif isinstance(placement, Partial):
            partial.append((axis, placement.op))
        elif not isinstance(placement, Replicate):
            raise PlacementError(
                f"placement {placement!r} on axis {axis!r}",
                f"a {type(placement).__name__}",
                "a placement is Replicate(), Shard(dim) or Partial(op)",
                "use mw.Shard(0), for example",
            )
    return Layout(tuple(dims), tuple(partial))


def _dim_at(placement: Shard, ndim: int, axis: str) -> int:
    if not -ndim <= placement.dim < ndim:
        valid = f"use a dim from {-ndim} to {ndim - 1}" if ndim else "use Replicate(): a scalar has no dim to shard"
        raise PlacementError(
            f"{placement} on axis {axis!r}", f"a tensor of {ndim} dims", f"there is no dim {placement.dim}", valid
        )
    return placement.dim % ndim


def placements_of(layout: Layout, mesh: ProcessMesh) -> tuple[Placement, ...]:
    """Return one placement per mesh axis. Placements do not express the order of several axes that shard one dim."""
    return tuple(layout.on(axis) for axis in mesh.dim_names)
