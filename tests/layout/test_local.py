"""The local parts of a tensor partition it exactly, as `torch.chunk` would."""

from __future__ import annotations

from itertools import product
from math import prod

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from meshwright.layout import (
    Layout,
    LayoutError,
    ProcessMesh,
    Product,
    Spec,
    axes_of,
    chunk,
    cut,
    expand_products,
    local_length,
    local_ranges,
    local_shape,
)

from .strategies import specs


@given(st.integers(1, 40), st.integers(1, 12))
def test_pieces_are_those_of_torch_chunk(size, parts):
    wanted = [piece.tolist() for piece in torch.arange(size).chunk(parts)]
    pieces = [chunk(size, parts, at) for at in range(parts)]
    assert [list(range(start, start + n)) for start, n in pieces if n] == wanted
    assert all(n == 0 and start == size for start, n in pieces[len(wanted) :])


def test_no_elements_give_empty_pieces():
    assert [chunk(0, 3, at) for at in range(3)] == [(0, 0)] * 3


@given(st.integers(0, 30), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_several_axes_shard_one_dim_from_the_outermost(size, counts):
    axes = [f"a{i}" for i in range(len(counts))]
    sizes = dict(zip(axes, counts, strict=True))
    for at in product(*map(range, counts)):
        indices = torch.arange(size)
        for n, i in zip(counts, at, strict=True):
            pieces = indices.chunk(n) if len(indices) else ()
            indices = pieces[i] if i < len(pieces) else indices[:0]
        start, length = cut(size, axes, sizes, dict(zip(axes, at, strict=True)))
        assert list(range(start, start + length)) == indices.tolist()


def held(spec: Spec, rank: int) -> list[int]:
    """Return the flat global indices of the elements that a rank holds, by its ranges."""
    shape = expand_products(spec.shape, spec.layout)[0]
    box = tuple(slice(start, start + n) for start, n in spec.local_ranges(rank))
    return np.arange(prod(shape)).reshape(shape)[box].flatten().tolist()


def groups(spec: Spec) -> list[list[int]]:
    """Return the groups of ranks with equal coordinates along all axes that do not shard the tensor."""
    lines: dict[tuple[int, ...], list[int]] = {}
    for rank in spec.mesh.process_ids:
        at = spec.mesh.coordinate(rank)
        lines.setdefault(tuple(at[a] for a in at if a not in spec.layout.cut_axes), []).append(rank)
    return list(lines.values())


@given(specs())
def test_local_parts_partition_the_tensor(spec):
    """Along the sharding axes, one rank holds each element; along the other axes, all ranks hold the same elements."""
    for ranks in groups(spec):
        everything = [i for rank in ranks for i in held(spec, rank)]
        assert sorted(everything) == list(range(prod(spec.shape)))
    for rank in spec.mesh.process_ids:
        assert prod(spec.local_shape(rank)) == len(held(spec, rank))


@given(specs())
def test_shapes_ranges_and_offsets_agree(spec):
    sizes = spec.mesh.sizes
    for rank in spec.mesh.process_ids:
        at, shape = spec.mesh.coordinate(rank), spec.local_shape(rank)
        assert shape == local_shape(spec.shape, spec.layout, sizes, at)
        assert shape == tuple(local_length(n, d, sizes, at) for n, d in zip(spec.shape, spec.layout.dims, strict=True))
        assert spec.local_ranges(rank) == local_ranges(spec.shape, spec.layout, sizes, at)
        if spec.layout.is_simple:
            assert spec.local_ranges(rank) == tuple((spec.offset(rank, d), n) for d, n in enumerate(shape))


@given(specs())
def test_an_expanded_product_has_the_same_parts(spec):
    shape, layout = expand_products(spec.shape, spec.layout)
    assert layout.is_simple
    assert prod(shape) == prod(spec.shape)
    assert (layout.partial, layout.varying) == (spec.layout.partial, spec.layout.varying)
    assert layout.cut_axes == spec.layout.cut_axes
    flat = Spec(spec.mesh, layout, shape, spec.dtype)
    for rank in spec.mesh.process_ids:
        assert flat.local_ranges(rank) == spec.local_ranges(rank)
        assert prod(flat.local_shape(rank)) == prod(spec.local_shape(rank))


def test_a_product_dim_is_held_in_runs():
    """Of a fused weight with 3 parts of 4 rows, rank 1 of 2 holds the second half of each part."""
    spec = Spec(ProcessMesh([0, 1], ["tp"]), Layout((Product(((3, ()), (4, ("tp",)))),)), (12,), torch.float32)
    assert held(spec, 1) == [2, 3, 6, 7, 10, 11]
    assert spec.local_shape(1) == (6,)
    assert spec.local_ranges(1) == ((0, 3), (2, 2))
    with pytest.raises(LayoutError, match="several ranges"):
        spec.offset(1, 0)


def test_a_rank_outside_the_mesh_holds_nothing():
    spec = Spec(ProcessMesh([0, 1], ["x"]), Layout((("x",), ())), (4, 3), torch.float32)
    assert spec.local_shape(7) == (0, 3)
    assert Spec(spec.mesh, Layout(()), (), torch.float32).local_shape(7) == ()


def test_the_axes_of_a_dim():
    assert axes_of(("x", "y")) == ("x", "y")
    assert axes_of(Product(((2, ("y",)), (3, ("x", "z"))))) == ("y", "x", "z")
    assert Product(((2, ("y",)), (3, ("x",)), (4, ()))).size == 24
