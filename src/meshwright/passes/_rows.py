"""Parts as rows: what lets one step carry the parts of several tensors, or a part in another shape.

A step along some axes moves numbers among the ranks that differ along those axes alone. To it, all other axes only tell
tensors apart, so any `n` numbers that each rank holds are a row of `n × ranks` numbers that is cut over the other axes.
Where all ranks hold parts of one shape, that row is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from meshwright.graph import Draft, Origin, Spot, Value
from meshwright.layout import Layout, ProcessMesh, Product, Spec
from meshwright.reshard import Step


def is_even(spec: Spec) -> bool:
    """True when all ranks of the mesh hold parts of one shape."""
    sizes = spec.mesh.sizes
    for n, dim in zip(spec.shape, spec.layout.dims, strict=True):
        for size, axes in dim.factors if isinstance(dim, Product) else ((n, dim),):
            if size % prod(sizes[a] for a in axes):
                return False
    return True


def is_known(*values: Value) -> bool:
    """True when no size of the values is a symbol."""
    return all(isinstance(n, int) for v in values for n in v.shape)


def row(mesh: ProcessMesh, length: int, dtype: torch.dtype, axes: Sequence[str], op: str | None = None) -> Spec:
    """A row of `length` numbers on each rank: terms along `axes` where there is an `op`, else cut over them, innermost.

    >>> mesh = ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
    >>> row(mesh, 5, torch.float32, ["dp"], "sum"), row(mesh, 5, torch.float32, ["dp"])
    (f32[10@tp] +dp, f32[20@tp@dp])
    """
    return shaped(mesh, (length,), dtype, axes, op)


def shaped(mesh: ProcessMesh, shape: Sequence[int], dtype: torch.dtype, axes: Sequence[str], op: str | None) -> Spec:
    """What `row` gives, of parts of any shape: the first dim is the one that is cut."""
    cut = [a for a, n in mesh.sizes.items() if n > 1 and a not in axes] + ([] if op else list(axes))
    terms = tuple((a, op) for a in axes) if op else ()
    if not shape:
        return Spec(mesh, Layout((), terms), (), dtype)
    whole = (shape[0] * prod(mesh.sizes[a] for a in cut), *shape[1:])
    return Spec(mesh, Layout((tuple(cut), *((),) * (len(shape) - 1)), terms), whole, dtype)


def lie_alike(a: Spec, b: Spec) -> bool:
    """True when the parts of both are the same: they may differ in what their gradients are."""
    if a.mesh is not b.mesh or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return a.layout.dims == b.layout.dims and a.layout.partial == b.layout.partial


def received(step: Step, src: Spec) -> int:
    """Bytes that the busiest rank receives: chunks are dealt so that it is the first one."""
    return step.received(src, src.mesh.process_ids[0])


def is_only_use(draft: Draft, v: Value, by: Spot) -> bool:
    """True when nothing but `by` needs `v`."""
    return draft.users(v) == (by,) and not draft.is_result(v)


def place(origin: Origin) -> str:
    """Where a node comes from, in words."""
    return " ".join(filter(None, [origin.phase, origin.layer, origin.where]))
