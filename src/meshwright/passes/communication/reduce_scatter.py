"""Replacement of all-reduce and slice by reduce-scatter, also if pointwise operators are in between.

Slicing commutes with pointwise operators, so the slice may come after some of them:

    slice(f(all_reduce(x), y)) = f(reduce_scatter(x), slice(y))

The whole sum must have no other reader. A replicated operand is sliced locally, without communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from meshwright.graph import (
    Change,
    Conversion,
    Draft,
    Op,
    Pass,
    Program,
    Spot,
    Value,
    is_pure,
    map_values,
    register_pass,
)
from meshwright.reshard import AllReduce, ConversionPlan, Relabel, Slice, plan

from .._rows import has_static_sizes, is_only_use, origin_text, received_bytes


@register_pass
@dataclass(frozen=True)
class Scatter(Pass):
    """Replace an all-reduce by a reduce-scatter if only a slice of it is used, directly or after pointwise operators.

    The sum and the operators in between must have no other reader.
    """

    name: ClassVar[str] = "scatter"
    keeps_sums: ClassVar[bool] = True

    def run(self, program: Program) -> Program:
        draft = Draft(program)
        changes: list[Change] = []
        for spot in list(draft):
            if spot.gone or not isinstance(spot.op, Conversion) or not isinstance(spot.op.step, Slice):
                continue
            way = _SliceSearch(draft, spot, spot.op, spot.op.step)
            before = way.back_to_sums(spot.ins[0], spot)
            if before and way.saved(before)[0] > 0:
                changes.append(way.sliced_first(before))
        return draft.finish(*changes) if changes else program


@dataclass(slots=True)
class _SliceSearch:
    """Search from a slice back to the all-reduces that it depends on, through pointwise operators."""

    draft: Draft
    last: Spot
    op: Conversion
    step: Slice
    slices: dict[Value, Value] = field(default_factory=dict[Value, Value])

    def back_to_sums(self, v: Value, user: Spot) -> Sequence[Spot]:
        """Return the all-reduces and operators to replace if `v` is sliced earlier, readers first; or none."""
        spot = self.draft.producer(v)
        has_known_shape = v.sizes == self.last.ins[0].sizes and has_static_sizes(v)
        if spot is None or not has_known_shape or not is_only_use(self.draft, v, user):
            return ()
        if isinstance(spot.op, Conversion):
            return (spot,) if self._is_sum(spot.op) else ()
        if not _is_pointwise(spot.op) or any(isinstance(x, Value) for x in spot.kwargs.values()):
            return ()
        before = list(dict.fromkeys(s for x in spot.ins for s in self.back_to_sums(x, spot)))
        if not before or not all(self._may_be_sliced(x) for x in spot.ins):
            return ()
        return (spot, *before)

    def saved(self, before: Sequence[Spot]) -> tuple[int, int]:
        """Return the saved bytes and rounds."""
        old = [s.op for s in before if isinstance(s.op, Conversion)]
        new = [Conversion(*step) for op in old for step in self._scattered(op).walk()]
        nbytes = sum(received_bytes(op.step, op.src) for op in old) - sum(received_bytes(op.step, op.src) for op in new)
        return nbytes, len(old) - sum(op.communicates for op in new)

    def sliced_first(self, before: Sequence[Spot]) -> Change:
        nbytes, rounds = self.saved(before)
        names = ", ".join(sorted({repr(self._scattered(s.op)) for s in before if isinstance(s.op, Conversion)}))
        self.draft.replace(self.last.outs[0], self._sliced(self.last.ins[0], before))
        for spot in (self.last, *before):
            self.draft.remove(spot)
        what = f"the sum that {self.op!r} reads is reduced by {names}"
        return Change("scatter", what, origin_text(self.last.origin), {"bytes": nbytes, "rounds": rounds})

    def _is_sum(self, op: Conversion) -> bool:
        dst, src = op.dst, self.op.src
        if not isinstance(op.step, AllReduce) or dst.mesh is not src.mesh or dst.shape != src.shape:
            return False
        return dst.layout.dims == src.layout.dims and dst.layout.partial == src.layout.partial

    def _may_be_sliced(self, x: Value) -> bool:
        return not x.is_tensor or x.sizes == self.last.ins[0].sizes or self._is_repeated(x)

    def _is_repeated(self, x: Value) -> bool:
        """True for an operand that is broadcast along the sliced dims."""
        whole = self.last.ins[0].shape
        if x.shape == whole:
            return False
        dims = [d - len(whole) + len(x.shape) for _, d in self.step.places]
        return all(d < 0 or x.shape[d] == 1 for d in dims)

    def _scattered(self, op: Conversion) -> ConversionPlan:
        """Return the plan from the operand of an all-reduce to the slice of its result."""
        return plan(op.src, self.op.dst.with_dtype(op.src.dtype))

    def _sliced(self, v: Value, before: Sequence[Spot]) -> Value:
        """Return the slice of `v`, after adding the nodes that compute it."""
        spot = self.draft.producer(v)
        if v in self.slices:
            return self.slices[v]
        if spot is None or spot not in before:
            assert isinstance(v.dtype, torch.dtype)
            op = Conversion(self.step, self.op.src.with_dtype(v.dtype))
            out: Value = self.draft.add(op, v, before=self.last, origin=self.last.origin)
        elif isinstance(spot.op, Conversion):
            out = self._walked(spot, self._scattered(spot.op))
        else:
            args = map_values(lambda x: self._sliced(x, before) if self._is_cut(x) else x, spot.args)
            out = self.draft.add(spot.op, *args, before=self.last, origin=spot.origin, **spot.kwargs)
        self.slices[v] = out
        return out

    def _is_cut(self, x: Value) -> bool:
        return x.is_tensor and not self._is_repeated(x)

    def _walked(self, spot: Spot, way: ConversionPlan) -> Value:
        """Add the steps of the plan at the position of the all-reduce, and return their result."""
        x = spot.ins[0]
        for step, spec in way.walk():
            if not isinstance(step, Relabel):
                x = self.draft.add(Conversion(step, spec), x, before=spot, origin=spot.origin)
        return x


def _is_pointwise(op: Op) -> bool:
    return torch.Tag.pointwise in getattr(op, "tags", ()) and is_pure(op)
