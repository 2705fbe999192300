"""Local tensors as rows, so that one step can convert several local tensors, or a local tensor in another shape.

A step along some axes moves elements between ranks that differ along these axes only. For the step, tensors of other
ranks are separate tensors. So any `n` local elements are a row of `n × ranks` elements that is sharded over the other
axes. If all local tensors have one shape, the spec of the row is equal on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from meshwright.graph import Draft, Origin, Spot, Value
from meshwright.layout import Layout, ProcessMesh, Product, Spec
from meshwright.reshard import ConversionStep


def has_equal_shards(spec: Spec) -> bool:
    """True if all local tensors on the mesh have the same shape."""
    sizes = spec.mesh.sizes
    for n, dim in zip(spec.shape, spec.layout.dims, strict=True):
        for size, axes in dim.factors if isinstance(dim, Product) else ((n, dim),):
            if size % prod(sizes[a] for a in axes):
                return False
    return True


def has_static_sizes(*values: Value) -> bool:
    """True if no size of the values is symbolic."""
    return all(isinstance(n, int) for v in values for n in v.shape)


def row_spec(mesh: ProcessMesh, length: int, dtype: torch.dtype, axes: Sequence[str], op: str | None = None) -> Spec:
    """Return the spec of a row of `length` elements per rank.

    With `op`, the row is partial along `axes`. Otherwise it is sharded over `axes`, as the innermost axes. It is
    sharded over all other axes.

    >>> mesh = ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
    >>> row_spec(mesh, 5, torch.float32, ["dp"], "sum"), row_spec(mesh, 5, torch.float32, ["dp"])
    (f32[10@tp] +dp, f32[20@tp@dp])
    """
    return sharded_rows_spec(mesh, (length,), dtype, axes, op)


def sharded_rows_spec(
    mesh: ProcessMesh, shape: Sequence[int], dtype: torch.dtype, axes: Sequence[str], op: str | None
) -> Spec:
    """Return the spec like `row_spec` for local tensors of any shape; the first dim is sharded."""
    cut = [a for a, n in mesh.sizes.items() if n > 1 and a not in axes] + ([] if op else list(axes))
    terms = tuple((a, op) for a in axes) if op else ()
    if not shape:
        return Spec(mesh, Layout((), terms), (), dtype)
    whole = (shape[0] * prod(mesh.sizes[a] for a in cut), *shape[1:])
    return Spec(mesh, Layout((tuple(cut), *((),) * (len(shape) - 1)), terms), whole, dtype)


def have_equal_local_tensors(a: Spec, b: Spec) -> bool:
    """True if both specs have equal local tensors; they may differ in the layout of their gradients."""
    if a.mesh is not b.mesh or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return a.layout.dims == b.layout.dims and a.layout.partial == b.layout.partial


def received_bytes(step: ConversionStep, src: Spec) -> int:
    """Return the bytes that the busiest rank receives: the first rank, which has the largest chunks."""
    return step.received(src, src.mesh.process_ids[0])


def is_only_use(draft: Draft, v: Value, by: Spot) -> bool:
    """True if `by` is the only reader of `v` and `v` is no result."""
    return draft.users(v) == (by,) and not draft.is_result(v)


def origin_text(origin: Origin) -> str:
    """Return the origin of a node as text."""
    return " ".join(filter(None, [origin.phase, origin.layer, origin.where]))
