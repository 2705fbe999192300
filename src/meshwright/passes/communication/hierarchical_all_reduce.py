"""Hierarchical all-reduce: a sum over fast and slow links is reduced in three steps, to save traffic on slow links.

    all_reduce over (outer, inner) = all_gather over inner · all_reduce over outer · reduce_scatter over inner

With `g` ranks along the inner axes, each rank sends `1/g` of the sum along the outer axes. The order of additions
changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch

from meshwright.graph import Change, Conversion, Draft, Pass, Program, Spot, register_pass
from meshwright.layout import hint
from meshwright.reshard import AllGather, AllReduce, ReduceScatter

from .._rows import has_equal_shards, has_static_sizes, origin_text, row_spec

aten = torch.ops.aten
OPS = ("sum", "avg", "max", "min")


@register_pass
@dataclass(frozen=True)
class Hierarchy(Pass):
    """Split all-reduces of at least `least` bytes over axes of both kinds: along `inner` axes first, then `outer` axes.

    The user names the axes: inner axes connect ranks by fast links (the GPUs of a node), outer axes by slow links.
    All-reduces of unevenly sharded tensors are unchanged.

    >>> Hierarchy(inner=("gpu",), outer=("node",))
    Hierarchy(inner=('gpu',), outer=('node',), least=65536)
    """

    name: ClassVar[str] = "hierarchy"
    inner: tuple[str, ...]
    outer: tuple[str, ...]
    least: int = 2**16

    def run(self, program: Program) -> Program:
        draft = Draft(program)
        changes = [
            self._split(draft, spot, spot.op, spot.op.step)
            for spot in list(draft)
            if isinstance(spot.op, Conversion) and isinstance(spot.op.step, AllReduce) and self._applies(spot, spot.op)
        ]
        return draft.finish(*changes) if changes else program

    def _applies(self, spot: Spot, op: Conversion) -> bool:
        step, sizes = op.step, op.src.mesh.sizes
        assert isinstance(step, AllReduce)
        kinds = [[a for a in step.axes if a in axes and sizes[a] > 1] for axes in (self.inner, self.outer)]
        if not all(kinds) or not {*step.axes} <= {*self.inner, *self.outer} or step.op not in OPS:
            return False
        (x,) = spot.ins
        return has_static_sizes(x) and has_equal_shards(op.src) and x.nbytes >= self.least

    def _split(self, draft: Draft, spot: Spot, op: Conversion, whole: AllReduce) -> Change:
        mesh, dtype = op.src.mesh, op.src.dtype
        inner = tuple(a for a in whole.axes if a in self.inner)
        outer = tuple(a for a in whole.axes if a in self.outer)
        (x,) = spot.ins
        numbers = prod(hint(n) for n in x.shape)
        places = tuple((a, 0) for a in inner)
        steps = (ReduceScatter(inner, places, whole.op), AllReduce(outer, whole.op), AllGather(places))
        spec = row_spec(mesh, numbers, dtype, whole.axes, whole.op)
        y = draft.add(aten.reshape.default, x, [numbers], before=spot, origin=spot.origin)
        for step in steps:
            y = draft.add(Conversion(step, spec), y, before=spot, origin=spot.origin)
            spec = step.apply(spec)
        y = draft.add(aten.reshape.default, y, list(x.shape), before=spot, origin=spot.origin)
        draft.replace(spot.outs[0], y)
        draft.remove(spot)
        ranks, across = prod(mesh.sizes[a] for a in whole.axes), prod(mesh.sizes[a] for a in outer)
        flat, split = 2 * (ranks - 1) / ranks, 2 * (across - 1) / across / (ranks // across)
        what = f"{whole!r} is {' · '.join(map(repr, steps))}"
        return Change(
            self.name, what, origin_text(spot.origin), {"bytes over outer axes": round((flat - split) * x.nbytes)}
        )
