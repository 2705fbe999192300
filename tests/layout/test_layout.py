"""Placements and layouts: one role for each axis, and the layout of the gradient."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from meshwright.layout import (
    PARTIAL_OPS,
    Layout,
    LayoutError,
    MeshwrightError,
    Partial,
    PlacementError,
    ProcessMesh,
    Product,
    Replicate,
    Shard,
    layout_of,
    placements_of,
    replicated,
)

from .strategies import specs

CUBE = ProcessMesh([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], ["x", "y", "z"])
PLACEMENTS = st.one_of(
    st.just(Replicate()), st.builds(Shard, st.integers(-2, 1)), st.builds(Partial, st.sampled_from(PARTIAL_OPS))
)


@given(st.lists(PLACEMENTS, max_size=3))
def test_placements_convert_to_a_layout_and_back(placements):
    layout = layout_of(placements, 2, CUBE)
    full = [*placements, *[Replicate()] * (3 - len(placements))]
    positive = tuple(Shard(p.dim % 2) if isinstance(p, Shard) else p for p in full)
    assert placements_of(layout, CUBE) == positive
    for dim, axes in enumerate(layout.dims):
        assert list(axes) == [a for a, p in zip("xyz", positive, strict=True) if p == Shard(dim)]
    assert layout.partial_axes == tuple(a for a, p in zip("xyz", full, strict=True) if isinstance(p, Partial))
    assert layout.varying == ()


@given(specs())
def test_every_axis_has_one_role(spec):
    layout = spec.layout
    assert sorted(layout.axes) == sorted({*layout.cut_axes, *layout.partial_axes, *layout.varying})
    for axis in spec.mesh.dim_names:
        placement = layout.on(axis)
        assert placement.is_shard() == (axis in layout.cut_axes)
        assert placement.is_partial() == (axis in layout.partial_axes)
        assert placement.is_replicate() == (axis not in {*layout.cut_axes, *layout.partial_axes})
        if placement.is_shard():
            assert placement.is_shard(placement.get_dim())
            assert not placement.is_shard(placement.get_dim() + 1)
        if placement.is_partial():
            assert dict(layout.partial)[axis] == placement.op
    assert spec.placements == tuple(map(layout.on, spec.mesh.dim_names))
    assert layout.is_replicated == (not layout.cut_axes and not layout.partial)
    assert layout.is_simple == (not any(isinstance(d, Product) for d in layout.dims))
    assert layout.ndim == len(spec.shape)


@given(specs())
def test_the_gradient_of_a_layout(spec):
    """Shards stay; terms become a varying replication, and back; a mean's and an extremum's become terms of a sum."""
    layout, dual = spec.layout, spec.layout.dual()
    assert dual.dims == layout.dims
    ops = dict(layout.partial)
    shared = {a for a, op in ops.items() if op in ("avg", "max", "min")}
    assert set(dual.varying) == set(ops) - shared
    assert dict(dual.partial) == dict.fromkeys({*layout.varying, *shared}, "sum")
    if all(op == "sum" for op in ops.values()):
        assert dual.dual() == layout
    assert spec.dual().layout == dual
    assert spec.dual() is spec.dual()


def test_the_order_of_marks_does_not_matter():
    one = Layout(((),), (("y", "max"), ("x", "sum")), ("z", "a"))
    other = Layout(((),), (("x", "sum"), ("y", "max")), ("a", "z"))
    assert one == other
    assert hash(one) == hash(other)
    assert repr(one) == "[:] +x +y:max ~a ~z"


def test_varying_is_replaced():
    layout = Layout((("x",),), (("y", "sum"),), ("z",))
    assert layout.with_varying(["a", "b"]) == Layout((("x",),), (("y", "sum"),), ("a", "b"))
    assert layout.with_varying([]).varying == ()


def test_a_replicated_layout():
    assert replicated(2) == Layout(((), ()))
    assert replicated(2).is_replicated
    assert replicated(0).ndim == 0
    assert not Layout((("x",),)).is_replicated
    assert not Layout(((),), (("x", "sum"),)).is_replicated
    assert not Layout((Product(((2, ("x",)), (2, ()))),)).is_replicated
    assert Layout((), (), ("x",)).is_replicated


@pytest.mark.parametrize(
    ("dims", "partial", "varying"),
    [
        ((("x", "x"),), (), ()),
        ((("x",), ("x",)), (), ()),
        ((("x",),), (("x", "sum"),), ()),
        ((("x",),), (), ("x",)),
        (((),), (("x", "sum"),), ("x",)),
        (((),), (("x", "sum"), ("x", "max")), ()),
        ((Product(((2, ("x",)), (2, ("x",)))),), (), ()),
    ],
)
def test_an_axis_with_two_roles_is_refused(dims, partial, varying):
    with pytest.raises(LayoutError, match="axis 'x' in two places"):
        Layout(dims, partial, varying)


@pytest.mark.parametrize(
    ("placements", "ndim", "why"),
    [
        ([Shard(2)], 2, "there is no dim 2"),
        ([Shard(-3)], 2, "there is no dim -3"),
        ([Shard(0)], 0, "a scalar has no dim"),
        ([Replicate()] * 4, 2, "one placement per mesh axis"),
        (["Shard(0)"], 2, "a placement is"),
    ],
)
def test_placements_that_do_not_fit_are_refused(placements, ndim, why):
    with pytest.raises(PlacementError, match=why):
        layout_of(placements, ndim, CUBE)


def test_the_valid_dims_are_named():
    with pytest.raises(PlacementError, match="a dim from -2 to 1"):
        layout_of([Shard(5)], 2, CUBE)


def test_invalid_placements_are_refused():
    with pytest.raises(PlacementError, match="a dim is an integer"):
        Shard("0")
    with pytest.raises(PlacementError, match="one of 7 operations"):
        Partial("mean")
    assert Partial() == Partial("sum")
    assert [repr(p) for p in (Replicate(), Shard(1), Partial(), Partial("max"))] == [
        "Replicate()",
        "Shard(1)",
        "Partial()",
        "Partial('max')",
    ]


def test_an_error_has_four_parts():
    error = MeshwrightError("this", "that", "because", "other")
    assert (error.asked, error.found, error.why, error.write) == ("this", "that", "because", "other")
    assert str(error).splitlines() == [
        "MeshwrightError: this",
        "  found: that",
        "  why:   because",
        "  fix:   other",
    ]
