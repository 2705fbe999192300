"""What a second form may ask about the part of its call that a rank carries out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from meshwright.comm import Carrier
from meshwright.layout import Layout, Spec, axes_of

from ._convert import convert_local


@dataclass(frozen=True, slots=True)
class OnRank:
    """A form's view of its call: specs of the operands as they are held, of the results, and the rank's carrier."""

    ins: Sequence[Spec | None]
    outs: Sequence[Spec]
    here: Carrier

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

    def halo(self, x: Tensor, operand: int, dim: int, before: int, after: int) -> Tensor:
        spec = self._spec(operand)
        dims = tuple(() if d == dim else axes_of(c) for d, c in enumerate(spec.layout.dims))
        varying = (*spec.layout.varying, *self._axes(operand, dim))
        whole = convert_local(x, spec, spec.with_layout(Layout(dims, spec.layout.partial, varying)))
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
        """The spec of what all ranks' `x` are together, stacked along a new first dim, apart along all other axes."""
        spec, axes = self._spec(operand), self._axes(operand, dim)
        varying = tuple(a for a in spec.mesh.dim_names if a not in axes)
        layout = Layout((axes, *((),) * x.dim()), varying=varying)
        return Spec(spec.mesh, layout, (self.ranks(operand, dim), *x.shape), x.dtype)

    def _terms(self, x: Tensor, operand: int, dim: int, op: str) -> Spec:
        spec, axes = self._spec(operand), self._axes(operand, dim)
        varying = tuple(a for a in spec.mesh.dim_names if a not in axes)
        layout = Layout(((),) * x.dim(), tuple((a, op) for a in axes), varying)
        return Spec(spec.mesh, layout, x.shape, x.dtype)
