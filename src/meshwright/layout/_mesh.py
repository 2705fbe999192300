"""Process meshes: ranks in an n-dimensional array with named axes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._errors import MeshError

_LISTED = 32
"""Number of ranks above which `repr` does not list evenly spaced ranks."""

RankArray = NDArray[np.int64]
MeshIndex = int | slice | str


class ProcessMesh:
    """Ranks arranged along named axes; immutable, and one object for equal content.

    >>> mesh = ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "tp"])
    >>> mesh
    ProcessMesh([dp=2, tp=2])
    >>> mesh["dp", 1]
    ProcessMesh([tp=2], ranks=[2, 3])

    Raises:
        MeshError: a rank occurs twice or is negative, the mesh is empty, or the names do not fit.
    """

    _known: ClassVar[WeakValueDictionary[Any, ProcessMesh]] = WeakValueDictionary()

    shape: tuple[int, ...]
    process_ids: tuple[int, ...]
    dim_names: tuple[str, ...]

    def __new__(cls, mesh: ArrayLike, dim_names: Sequence[str] | None = None) -> ProcessMesh:
        ranks = _rank_array(mesh)
        names = tuple(dim_names) if dim_names is not None else tuple(f"d{i}" for i in range(ranks.ndim))
        _check_names(names, ranks)
        key = (tuple(ranks.shape), tuple(int(r) for r in ranks.flat), names)
        found = cls._known.get(key)
        if found is None:
            found = object.__new__(cls)
            found.shape, found.process_ids, found.dim_names = key
            cls._known[key] = found
        return found

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return len(self.process_ids)

    @cached_property
    def mesh(self) -> RankArray:
        """The ranks as an array (a read-only copy)."""
        array = np.array(self.process_ids, dtype=np.int64).reshape(self.shape)
        array.setflags(write=False)
        return array

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Axis name → number of ranks along it."""
        return dict(zip(self.dim_names, self.shape, strict=True))

    @cached_property
    def steps(self) -> tuple[int, tuple[int, ...]] | None:
        """First rank, and the rank step along each axis; None if ranks are not evenly spaced.

        >>> ProcessMesh([[4, 6], [5, 7]]).steps
        (4, (1, 2))
        """
        first = self.process_ids[0]
        ends = np.eye(self.ndim, dtype=np.int64)
        found = tuple(int(self.mesh[tuple(e)]) - first if n > 1 else 0 for e, n in zip(ends, self.shape, strict=True))
        return (first, found) if np.array_equal(evenly(first, found, self.shape), self.mesh) else None

    @cached_property
    def _coordinates(self) -> dict[int, dict[str, int]]:
        return {
            rank: dict(zip(self.dim_names, (int(i) for i in np.unravel_index(at, self.shape)), strict=True))
            for at, rank in enumerate(self.process_ids)
        }

    @cached_property
    def _groups(self) -> dict[tuple[int, tuple[str, ...]], tuple[int, ...]]:
        return {}

    def __contains__(self, rank: object) -> bool:
        return rank in self._coordinates

    def get_dim_size(self, name: str) -> int:
        """Return the number of ranks along axis `name`. Raises MeshError for an unknown name."""
        return self.shape[self.axis(name)]

    def axis(self, name: str) -> int:
        """Return the position of the axis `name`. Raises MeshError for an unknown name."""
        if name not in self.dim_names:
            raise MeshError(
                f"axis {name!r} of {self}",
                f"axes {', '.join(self.dim_names)}",
                f"there is no axis {name!r}",
                f"use one of {', '.join(repr(n) for n in self.dim_names)}",
            )
        return self.dim_names.index(name)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the index of `rank` along each axis, by name. Raises MeshError for a rank outside the mesh."""
        found = self._coordinates.get(rank)
        if found is None:
            raise MeshError(
                f"the coordinate of rank {rank}",
                f"a mesh of ranks {list(self.process_ids)}",
                f"rank {rank} is not in the mesh",
                "use a rank of this mesh, or guard the call with `rank in mesh`",
            )
        return found

    def group(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` only along `axes`, the first axis outermost."""
        key = (rank, tuple(axes))
        found = self._groups.get(key)
        if found is None:
            at = self.coordinate(rank)
            index = tuple(slice(None) if n in key[1] else at[n] for n in self.dim_names)
            left = [n for n in self.dim_names if n in key[1]]
            block = self.mesh[index].transpose([left.index(n) for n in key[1]])
            found = self._groups[key] = tuple(int(r) for r in block.flat)
        return found

    def get_submesh(self, names: Sequence[str], rank: int) -> ProcessMesh:
        """Return the submesh along axes `names` that contains `rank`.

        >>> ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"]).get_submesh(["tp"], rank=2)
        ProcessMesh([tp=2], ranks=[2, 3])
        """
        for name in names:
            self.axis(name)
        shape = [self.sizes[n] for n in names]
        return ProcessMesh(np.array(self.group(rank, names)).reshape(shape), names)

    def get_submesh_with_dim(self, name: str, rank: int) -> ProcessMesh:
        """Return the one-dim submesh along axis `name` that contains `rank`."""
        return self.get_submesh([name], rank)

    def get_mesh_with_dim(self, name: str, index: int | None = None) -> ProcessMesh:
        """Return the mesh with axis `name` first, or its slice at `index` along that axis."""
        if index is not None:
            return self[name, index]
        order = [self.axis(name), *(i for i in range(self.ndim) if i != self.axis(name))]
        return ProcessMesh(self.mesh.transpose(order), [self.dim_names[i] for i in order])

    def __getitem__(self, index: MeshIndex | tuple[MeshIndex, ...]) -> ProcessMesh:
        """Return a slice: `mesh["pp", 0]` fixes a named axis; `mesh[0]` and `mesh[:, 1:]` slice as for an array."""
        items: tuple[Any, ...] = index if isinstance(index, tuple) else (index,)
        if isinstance(items[0], str):
            items = self._named_index(items)
        return self._slice(items)

    def _named_index(self, items: tuple[Any, ...]) -> tuple[Any, ...]:
        index: list[Any] = [slice(None)] * self.ndim
        if len(items) == 1:
            return tuple(self._keep_only(items[0]))
        for name, at in zip(items[::2], items[1::2], strict=True):
            index[self.axis(name)] = at
        return tuple(index)

    def _keep_only(self, name: str) -> list[Any]:
        raise MeshError(
            f"mesh[{name!r}]",
            f"{self} without an index along {name!r}",
            "the mesh has several lines of ranks along this axis",
            f"use mesh[{name!r}, 0] to fix the axis, or mesh.get_submesh_with_dim({name!r}, rank)",
        )

    def _slice(self, items: tuple[Any, ...]) -> ProcessMesh:
        try:
            block = self.mesh[items]
        except IndexError as error:
            raise MeshError(f"mesh[{items}]", str(self), str(error), "use an index inside the mesh's shape") from None
        full = (*items, *[slice(None)] * (self.ndim - len(items)))
        names = [n for n, i in zip(self.dim_names, full, strict=True) if isinstance(i, slice)]
        return ProcessMesh(block if names else block.reshape(1), names or [self.dim_names[-1]])

    def __repr__(self) -> str:
        axes = ", ".join(f"{n}={s}" for n, s in self.sizes.items())
        if self.process_ids == tuple(range(self.size)):
            return f"ProcessMesh([{axes}])"
        even = self.steps if self.size > _LISTED else None
        ranks = f"{list(self.process_ids)}" if even is None else f"{even[0]} and on by {even[1]}"
        return f"ProcessMesh([{axes}], ranks={ranks})"

    def __reduce__(self) -> tuple[Any, ...]:
        return ProcessMesh, (self.mesh.tolist(), self.dim_names)

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessMesh:
        return self


def evenly(first: int, steps: Sequence[int], shape: Sequence[int]) -> RankArray:
    """Return the ranks of a mesh as an array, from its first rank and its `steps`."""
    return first + np.tensordot(np.asarray(steps, dtype=np.int64), np.indices(shape), 1)


def _as_rows(mesh: Any) -> Any:
    """Return nested lists for a tensor, which NumPy cannot read from a device; this module does not import torch."""
    return mesh.tolist() if hasattr(mesh, "tolist") else mesh


def _rank_array(mesh: ArrayLike) -> RankArray:
    try:
        given = np.asarray(_as_rows(mesh))
        with np.errstate(invalid="ignore"):  # NaN is refused below
            ranks = given.astype(np.int64)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:  # torch refuses tensors without numbers
        raise MeshError(
            f"ProcessMesh({mesh!r})", "rows that do not form an array", str(error), "use rows such as [[0, 1], [2, 3]]"
        ) from None
    if not np.array_equal(given, ranks):
        raise MeshError(
            f"ProcessMesh({mesh!r})",
            f"numbers of type {given.dtype}",
            "ranks are whole numbers below 2**63",
            "use ranks such as 0",
        )
    if ranks.ndim == 0:
        ranks = ranks.reshape(1)
    if ranks.size == 0:
        raise MeshError(f"ProcessMesh({mesh!r})", "no ranks", "a mesh needs at least one rank", "use ProcessMesh([0])")
    seen, count = np.unique(ranks, return_counts=True)
    if (count > 1).any():
        twice = [int(r) for r in seen[count > 1]]
        raise MeshError(
            f"ProcessMesh({mesh!r})",
            f"rank {twice[0]} more than once",
            "a rank has one position",
            "list each rank once",
        )
    if int(seen[0]) < 0:
        raise MeshError(f"ProcessMesh({mesh!r})", f"rank {int(seen[0])}", "ranks count from 0", "use ranks ≥ 0")
    return ranks


def _check_names(names: tuple[str, ...], ranks: RankArray) -> None:
    if len(names) != ranks.ndim or len(set(names)) != len(names):
        raise MeshError(
            f"dim_names {list(names)}",
            f"a mesh of {ranks.ndim} dims, shape {tuple(ranks.shape)}",
            "every mesh dim has one name of its own",
            f"pass {ranks.ndim} different names",
        )
    bad = [n for n in names if not n.isidentifier()]
    if bad:
        raise MeshError(
            f"dim_names {list(names)}",
            f"{bad[0]!r}",
            "an axis name must be an identifier",
            'use names such as "dp" and "tp"',
        )
