"""Specs with equal content are one object, and a spec gives the elements that a rank holds."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from meshwright.layout import Layout, LayoutError, ProcessMesh, Product, Spec, hint, identity

from .strategies import specs

MESH = ProcessMesh([[0, 1], [2, 3]], ["x", "y"])


@given(specs())
def test_equal_specs_are_one_object(spec):
    assert Spec(spec.mesh, spec.layout, list(spec.shape), spec.dtype) is spec
    assert pickle.loads(pickle.dumps(spec)) is spec
    assert copy.deepcopy(spec) is spec
    assert spec.with_layout(spec.layout) is spec
    assert spec.with_dtype(spec.dtype) is spec
    assert spec.concrete is spec
    assert spec.of_part(spec.local_shape(spec.mesh.process_ids[0])) is spec
    assert not spec.is_symbolic


@given(specs())
def test_different_specs_are_different_objects(spec):
    plain = spec.with_layout(Layout(((),) * spec.ndim))
    assert (plain is spec) == (spec.layout == plain.layout)
    assert (plain.mesh, plain.shape, plain.dtype) == (spec.mesh, spec.shape, spec.dtype)
    other = spec.with_dtype(torch.int32)
    assert other is not spec
    assert (other.mesh, other.layout, other.shape, other.dtype) == (spec.mesh, spec.layout, spec.shape, torch.int32)
    longer = Spec(spec.mesh, Layout(((), *spec.layout.dims), spec.layout.partial), (2, *spec.shape), spec.dtype)
    assert longer.ndim == spec.ndim + 1


@given(specs())
def test_bytes_of_the_whole_tensor(spec):
    assert spec.nbytes == torch.empty(spec.shape, dtype=spec.dtype, device="meta").nbytes
    assert isinstance(spec.shape, torch.Size)
    assert spec.ndim == len(spec.shape)


@pytest.mark.parametrize(
    ("layout", "shape", "why"),
    [
        (Layout(((),)), (4, 4), "the layout has 1 dims, the shape 2"),
        (Layout((("z",),)), (4,), "the mesh has no axis 'z'"),
        (Layout(((),), (("z", "sum"),)), (4,), "the mesh has no axis 'z'"),
        (Layout(((),), (), ("z",)), (4,), "the mesh has no axis 'z'"),
        (Layout((Product(((2, ()), (3, ()))),)), (4,), "the product of the factors is 6"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(layout, shape, why):
    with pytest.raises(LayoutError, match=why):
        Spec(MESH, layout, shape, torch.float32)


def symbols(*sizes: int) -> list[torch.SymInt]:
    """Return symbolic sizes with these hints, all of one shape environment."""
    shapes = ShapeEnv()
    sources = [ConstantSource(f"size_{at}") for at in range(len(sizes))]
    return [
        shapes.create_symintnode(shapes.create_symbol(n, source=source), hint=n)
        for n, source in zip(sizes, sources, strict=True)
    ]


def test_a_symbolic_size_has_a_hint_and_an_identity():
    (n,), (m,) = symbols(6), symbols(6)
    assert hint(n) == 6
    assert hint(5) == identity(5) == 5
    assert identity(n) == identity(n)
    assert identity(n) != identity(m)  # from different shape environments


def test_equal_symbolic_specs_are_one_object():
    n, m = symbols(8, 6)
    layout = Layout((("x",), ()))
    spec = Spec(MESH, layout, (n, 4), torch.float32)
    assert Spec(MESH, layout, (n, 4), torch.float32) is spec
    assert Spec(MESH, layout, (m, 4), torch.float32) is not spec
    assert spec.is_symbolic
    assert spec.nbytes == 8 * 4 * 4
    assert spec.concrete is Spec(MESH, layout, (8, 4), torch.float32)


def test_a_local_part_gives_the_sizes_of_a_symbolic_spec():
    (n,) = symbols(8)
    spec = Spec(MESH, Layout((("x", "y"), ())), (n, 4), torch.float32)
    assert spec.of_part((3, 4)) is Spec(MESH, spec.layout, (12, 4), torch.float32)


@pytest.mark.parametrize("size", [8, 7, 5, 1])
def test_symbolic_pieces_are_those_of_the_hint(size):
    (n,) = symbols(size)
    spec = Spec(MESH, Layout((("x", "y"),)), (n,), torch.float32)
    for rank in MESH.process_ids:
        assert tuple(map(hint, spec.local_shape(rank))) == spec.concrete.local_shape(rank)
        start, length = spec.local_ranges(rank)[0]
        assert (hint(start), hint(length)) == spec.concrete.local_ranges(rank)[0]
