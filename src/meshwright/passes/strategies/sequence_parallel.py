"""Sequence parallelism: between tensor-parallel layers, each rank works on its shard of the sequence.

If a tensor-parallel block ends in an all-reduce, all ranks repeat the same residual sums, norms and dropouts. Instead,
the partial sums are reduce-scattered along the sequence, each rank works on its shard, and the next tensor-parallel
layer gathers. This moves the same bytes with less work and memory (Korthikanti et al. 2022, Reducing Activation
Recomputation in Large Transformer Models).

Only layouts change, so the pass works on the captured program before recording. Rules, conversions and their transposes
then give correct results, including the gradients of norms, which become sums over the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from meshwright.graph import Change, Draft, Pass, Program, Spot, Value, map_values, register_pass
from meshwright.layout import Layout, Product, Spec, axes_of, hint
from meshwright.tensor import DistTensor, ReshardMark, redistribute

from .._rows import origin_text

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Weight:
    """Positions of an operator's weight (`at`) and input (`x`), and the weight's summed dim and kept dim."""

    at: int
    x: int
    summed: int
    kept: int | None


PRODUCTS: Mapping[Any, Weight] = {
    aten.linear.default: Weight(at=1, x=0, summed=1, kept=0),
    aten.matmul.default: Weight(at=1, x=0, summed=0, kept=1),
    aten.embedding.default: Weight(at=0, x=1, summed=0, kept=None),
}
SAME_WEIGHT: Mapping[Any, tuple[int, int]] = {
    aten.t.default: (1, 0),
    aten.to.dtype: (0, 1),
    aten._to_copy.default: (0, 1),
    aten.contiguous.default: (0, 1),
}
"""Operators that a weight may pass through, with the operand's dim for each dim of the result."""


@dataclass(frozen=True, slots=True)
class ReshardAlongAxis:
    """Mark for one mesh axis, which shards dim `dim`, or no dim if it is None. Other axes do not change."""

    axis: str
    dim: int | None

    def __call__(self, x: Tensor) -> Tensor:
        if not isinstance(x, DistTensor) or self.axis not in x.spec.mesh.sizes or not x.spec.layout.is_simple:
            return x.view_as(x)
        return redistribute(x, x.spec.mesh, self.layout(x.spec.layout))

    def layout(self, before: Layout) -> Layout:
        """Return the new layout. Without a dim, the tensor is replicated and varying along the axis."""
        dims = [tuple(a for a in d if a != self.axis) for d in before.dims if not isinstance(d, Product)]
        partial = tuple(p for p in before.partial if p[0] != self.axis)
        varying = tuple(a for a in before.varying if a != self.axis)
        if self.dim is None:
            return Layout(tuple(dims), partial, (*varying, self.axis))
        dims[self.dim] = (*dims[self.dim], self.axis)
        return Layout(tuple(dims), partial, varying)

    def __repr__(self) -> str:
        return f"replicate along {self.axis}" if self.dim is None else f"shard dim {self.dim} along {self.axis}"


@register_pass
@dataclass(frozen=True)
class SequenceParallel(Pass):
    """Shard the results of tensor-parallel layers along `dim` over `axis`, up to the next such layer.

    A layer is tensor-parallel if its weight is sharded over `axis`. Marks that replicate the residual stream along
    `axis` are changed to shard it.

    >>> SequenceParallel("tp")
    SequenceParallel(axis='tp', dim=1)
    """

    name: ClassVar[str] = "sequence_parallel"
    on: ClassVar[Literal["captured", "recorded"]] = "captured"
    keeps_sums: ClassVar[bool] = True
    axis: str
    dim: int = 1

    def run(self, program: Program) -> Program:
        sharding = _SequenceSharding(Draft(program), self.axis, self.dim)
        for spot in list(sharding.draft):
            if sharding.ends_in_terms(spot):
                sharding.cut(spot)
        if not sharding.streams:
            return program
        for spot in list(sharding.draft):
            sharding.remark(spot)
            sharding.gather(spot)
        return sharding.draft.finish(*sharding.changes)


@dataclass(slots=True)
class _SequenceSharding:
    draft: Draft
    axis: str
    dim: int
    streams: set[tuple[Any, ...]] = field(default_factory=set[tuple[Any, ...]])
    gathered: dict[Value, Value] = field(default_factory=dict[Value, Value])
    changes: list[Change] = field(default_factory=list[Change])

    def ends_in_terms(self, spot: Spot) -> bool:
        """True for a product with a weight sharded in the summed dim, and a result [batch, sequence, hidden]."""
        weight = PRODUCTS.get(spot.op)
        if weight is None or len(spot.outs[0].shape) != 3:
            return False
        found = self._sharded_dim(spot.args[weight.at])
        return found is not None and found[0] == weight.summed and hint(spot.outs[0].shape[self.dim]) >= found[1]

    def cut(self, spot: Spot) -> None:
        """Shard the result of a product along the sequence: its partial sums are reduce-scattered."""
        (out,) = spot.outs
        self.streams.add(out.shape)
        self._insert(ReshardAlongAxis(self.axis, self.dim), spot, out)
        self._add_change(f"sharded along the sequence after {spot.op}", spot, self._unkept_bytes(out))

    def remark(self, spot: Spot) -> None:
        """Change a mark that replicates the residual stream along the axis to a mark that shards it."""
        if not isinstance(spot.op, ReshardMark) or spot.outs[0].shape not in self.streams:
            return
        layout, mesh = spot.op.layout, spot.op.mesh
        if self.axis in mesh.sizes and self.axis not in (*layout.cut_axes, *layout.partial_axes) and layout.is_simple:
            spot.op = replace(spot.op, layout=ReshardAlongAxis(self.axis, self.dim).layout(layout))

    def gather(self, spot: Spot) -> None:
        """Gather the input of a product whose weight is sharded in the kept dim, once for all such products."""
        weight = PRODUCTS.get(spot.op)
        if weight is None or weight.kept is None:
            return
        found = self._sharded_dim(spot.args[weight.at])
        if found is None or found[0] != weight.kept:
            return
        x = spot.args[weight.x]
        if not isinstance(x, Value) or len(x.shape) != 3:
            return
        if x not in self.gathered:
            self.gathered[x] = self._fresh_value(x)
            origin = replace(spot.origin, grad=True)  # a later product may have gradients
            self.draft.add_as(ReshardAlongAxis(self.axis, None), (x,), {}, self.gathered[x], spot, origin)
            self._add_change(f"gathered before {spot.op}", spot)
        whole = self.gathered[x]
        self.draft.set_args(spot, map_values(lambda v: whole if v is x else v, spot.args))

    def _add_change(self, what: str, spot: Spot, bytes_kept: float = 0) -> None:
        saved = {"bytes": bytes_kept} if bytes_kept else {}
        self.changes.append(Change("sequence_parallel", what, origin_text(spot.origin), saved))

    def _unkept_bytes(self, v: Value) -> float:
        """Return the bytes of the sequence that a rank need not keep; 0 if the layout is unknown."""
        spec = self.draft.program.specs.get(v)
        if spec is None or self.axis not in spec.mesh.sizes:
            return 0
        n = spec.mesh.sizes[self.axis]
        others = prod(spec.mesh.sizes[a] for a in spec.layout.cut_axes if a != self.axis)
        return v.nbytes / others * (n - 1) / n

    def _insert(self, op: ReshardAlongAxis, behind: Spot, v: Value) -> None:
        new = self._fresh_value(v)
        self.draft.replace(v, new)
        assert behind.after is not None
        self.draft.add_as(op, (v,), {}, new, behind.after, behind.origin)

    def _fresh_value(self, v: Value) -> Value:
        return Value(self.draft.names.fresh("along"), v.shape, v.dtype, v.device)

    def _sharded_dim(self, v: Value) -> tuple[int, int] | None:
        """Return the dim of a two-dim weight that the axis shards, and the number of ranks along the axis; or None."""
        spec = self._spec(v)
        if spec is not None:
            dim = next((d for d, axes in enumerate(spec.layout.dims) if self.axis in axes_of(axes)), None)
            return None if dim is None else (dim, spec.mesh.sizes[self.axis])
        maker = self.draft.producer(v)
        order = SAME_WEIGHT.get(maker.op) if maker is not None else None
        if maker is None or order is None:
            return None
        found = self._sharded_dim(maker.ins[0])
        return None if found is None else (order.index(found[0]), found[1])

    def _spec(self, v: Value) -> Spec | None:
        maker = self.draft.producer(v)
        if maker is not None:
            if not isinstance(maker.op, ReshardMark) or not isinstance(v.dtype, torch.dtype):
                return None
            return Spec(maker.op.mesh, maker.op.layout, v.shape, v.dtype)
        return next((i.spec for i in self.draft.program.inputs if i.value is v), None)
