"""Information about a rank's part of a call, for local forms of operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from meshwright.comm import Communicator
from meshwright.layout import Layout, ProcessMesh, Spec, axes_of

from ..conversion.convert import convert_local


@dataclass(frozen=True, slots=True)
class PlannedLocalCall:
    """A form's view of its call: the specs of the operands and of the results, and the rank's communicator."""

    ins: Sequence[Spec | None]
    outs: Sequence[Spec]
    here: Communicator

    def start(self, operand: int, dim: int) -> int:
        return self.here.offset(self._spec(operand), dim)

    def total(self, operand: int, dim: int) -> int:
        return self._spec(operand).shape[dim]

    def out_shape(self, result: int) -> tuple[int, ...]:
        return self.here.local_shape(self.outs[result])

    def ranks(self, operand: int, dim: int) -> int:
        spec, total = self._spec(operand), 1
        for axis in self._axes(operand, dim):
            total *= spec.mesh.sizes[axis]
        return total

    def index(self, operand: int, dim: int) -> int:
        return self.here.place(self._spec(operand).mesh, self._axes(operand, dim))

    def gather(self, x: Tensor, operand: int, dim: int) -> Tensor:
        stacked = self._stacked(x, operand, dim)
        whole = stacked.with_layout(Layout(((),) * stacked.ndim, varying=stacked.mesh.dim_names))
        return convert_local(x.unsqueeze(0), stacked, whole)

    def gather_invariant(self, x: Tensor, operand: int, dim: int) -> Tensor:
        stacked = self._stacked(x, operand, dim)
        whole = stacked.with_layout(Layout(((),) * stacked.ndim, varying=stacked.layout.varying))
        return convert_local(x.unsqueeze(0), stacked, whole)

    def permute(self, x: Tensor, operand: int, dim: int, sources: Sequence[int]) -> Tensor:
        mesh = self._spec(operand).mesh
        there = rearranged(mesh, self._axes(operand, dim), tuple(sources))
        each = Layout((mesh.dim_names, *((),) * x.dim()))
        shape = (mesh.size, *x.shape)
        found = convert_local(x.unsqueeze(0), Spec(mesh, each, shape, x.dtype), Spec(there, each, shape, x.dtype))
        return found.squeeze(0)

    def recut(self, x: Tensor, operand: int, dim: int, to: int) -> Tensor:
        spec = self._spec(operand).with_dtype(x.dtype)
        return convert_local(x, spec, recut(spec, dim, to))

    def recut_result(self, x: Tensor, result: int, dim: int, to: int) -> Tensor:
        spec = self.outs[result].with_dtype(x.dtype)
        return convert_local(x, recut(spec, dim, to), spec)

    def halo(self, x: Tensor, operand: int, dim: int, before: int, after: int) -> Tensor:
        spec, axes = self._spec(operand), self._axes(operand, dim)
        alone = tuple(a for a in spec.mesh.dim_names if a not in axes)
        cut = Layout(tuple(axes if d == dim else () for d in range(x.dim())), varying=alone)
        shape = (*x.shape[:dim], spec.shape[dim], *x.shape[dim + 1 :])  # other dims may have neighbours' rows already
        src = Spec(spec.mesh, cut, shape, x.dtype)
        whole = convert_local(x, src, src.with_layout(Layout(((),) * x.dim(), varying=spec.mesh.dim_names)))
        rows = F.pad(whole, [0, 0] * (x.dim() - 1 - dim) + [before, after])
        return rows.narrow(dim, self.here.offset(spec, dim), x.shape[dim] + before + after)

    def sum(self, x: Tensor, operand: int, dim: int) -> Tensor:
        spec = self._terms(x, operand, dim, "sum")
        axes = tuple(a for a, _ in spec.layout.partial)
        others = tuple(a for a in spec.mesh.dim_names if a not in axes)
        return convert_local(x, spec, spec.with_layout(Layout(((),) * x.dim(), varying=(*axes, *others))))

    def max(self, x: Tensor, operand: int, dim: int) -> Tensor:
        spec = self._terms(x, operand, dim, "max")
        with torch.no_grad():
            return convert_local(x.detach(), spec, spec.with_layout(Layout(((),) * x.dim())))

    def _spec(self, operand: int) -> Spec:
        spec = self.ins[operand]
        assert spec is not None
        return spec

    def _axes(self, operand: int, dim: int) -> tuple[str, ...]:
        return axes_of(self._spec(operand).layout.dims[dim])

    def _stacked(self, x: Tensor, operand: int, dim: int) -> Spec:
        """Return the spec of the `x` of all ranks stacked along a new first dim, varying along all other axes."""
        spec, axes = self._spec(operand), self._axes(operand, dim)
        varying = tuple(a for a in spec.mesh.dim_names if a not in axes)
        layout = Layout((axes, *((),) * x.dim()), varying=varying)
        return Spec(spec.mesh, layout, (self.ranks(operand, dim), *x.shape), x.dtype)

    def _terms(self, x: Tensor, operand: int, dim: int, op: str) -> Spec:
        spec, axes = self._spec(operand), self._axes(operand, dim)
        varying = tuple(a for a in spec.mesh.dim_names if a not in axes)
        layout = Layout(((),) * x.dim(), tuple((a, op) for a in axes), varying)
        return Spec(spec.mesh, layout, x.shape, x.dtype)


def recut(spec: Spec, dim: int, to: int) -> Spec:
    """Return `spec` with the axes that shard `dim` moved behind those that shard `to`."""
    dims = list(spec.layout.dims)
    dims[to], dims[dim] = (*axes_of(dims[to]), *axes_of(dims[dim])), ()
    return spec.with_layout(Layout(tuple(dims), spec.layout.partial, spec.layout.varying))


@lru_cache(maxsize=1024)
def rearranged(mesh: ProcessMesh, axes: tuple[str, ...], sources: tuple[int, ...]) -> ProcessMesh:
    """Return a mesh on which place `sources[i]` along `axes` has the rank of place i, which then receives its part.

    >>> line = ProcessMesh([4, 5, 6], ["cp"])
    >>> rearranged(line, ("cp",), (1, 2, 0))
    ProcessMesh([cp=3], ranks=[6, 4, 5])
    """
    order = [*map(mesh.axis, axes), *(d for d, name in enumerate(mesh.dim_names) if name not in axes)]
    ring = mesh.mesh.transpose(order)
    there = ring.reshape(len(sources), -1).copy()
    there[list(sources)] = ring.reshape(len(sources), -1)
    back = sorted(range(len(order)), key=order.__getitem__)
    return ProcessMesh(there.reshape(ring.shape).transpose(back), mesh.dim_names)
