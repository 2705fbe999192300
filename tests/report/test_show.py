"""Pictures of layouts: each piece names exactly the ranks that hold it, in the text and in the drawing."""

from __future__ import annotations

from itertools import product
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import meshwright as mw
from meshwright.layout import Layout, Product, Spec, expand_products, parse_spec
from meshwright.report import Listing, Picture
from meshwright.report._pieces import TensorPieces

MESH = mw.ProcessMesh(np.arange(12).reshape(2, 3, 2), ["x", "y", "z"])
HEADED = 2


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """Draw a spec in which every axis shards a dim or a factor, or sums terms, or replicates; sizes are uneven."""
    ndim = draw(st.integers(0, 3))
    spots: dict[str, object] = {a: draw(st.sampled_from(["terms", "repeat", *range(ndim)])) for a in MESH.dim_names}
    order = draw(st.permutations(MESH.dim_names))
    dims, shape = list[object](), list[int]()
    for d in range(ndim):
        axes = tuple(a for a in order if spots[a] == d)
        sizes = draw(st.tuples(st.integers(1, 4), st.integers(1, 7)))
        if draw(st.booleans()):
            split = draw(st.integers(0, len(axes)))
            dims.append(Product(((sizes[0], axes[:split]), (sizes[1], axes[split:]))))
            shape.append(sizes[0] * sizes[1])
        else:
            dims.append(axes)
            shape.append(sizes[1])
    terms = tuple((a, "sum") for a, spot in spots.items() if spot == "terms")
    return Spec(MESH, Layout(tuple(dims), terms), shape, torch.float32)


@given(specs())
def test_each_piece_names_the_ranks_that_hold_it(spec: Spec) -> None:
    drawn = TensorPieces.of(spec)
    shape = [max(s.start + s.length for s in found) for found in drawn.segments]
    held = {rank: np.zeros(shape, bool) for rank in MESH.process_ids}
    for chosen in product(*drawn.segments):
        at = tuple(slice(s.start, s.start + s.length) for s in chosen)
        holders = drawn.holders(chosen)
        assert len({len(terms) for terms in holders}) == 1
        for rank in (rank for terms in holders for rank in terms):
            assert not held[rank][at].any()
            held[rank][at] = True
    factors, _ = expand_products(spec.shape, spec.layout)
    for rank in MESH.process_ids:
        expected = np.zeros(factors, bool)
        expected[tuple(slice(a, a + n) for a, n in spec.local_ranges(rank))] = True
        assert (held[rank].reshape(factors) == expected).all()


@given(specs())
def test_every_layout_can_be_drawn(spec: Spec) -> None:
    picture = Picture(spec)
    assert str(picture).startswith(f"{spec!r} on ProcessMesh")
    drawn = ElementTree.fromstring(picture._repr_svg_())
    boxes = [box for box in drawn.iter() if box.tag.endswith("rect")]
    assert boxes
    assert all(float(box.get("x", -1)) >= 0 and float(box.get("y", -1)) >= 0 for box in boxes)


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("f32[10@x@z, 6]", ["       dim 1  0:6", "dim 0  0:3    0, 2, 4", "       3:5    1, 3, 5"]),
        ("f32[5@z] +x:max", ["dim 0  0:3  0^6, 2^8, 4^10", "       3:5  1^7, 3^9, 5^11"]),
        ("f32[] +y", ["    0+2+4, 1+3+5, 6+8+10, 7+9+11"]),
        ("f32[2@y]", ["dim 0  0:1  0, 1, 6, 7", "       1:2  2, 3, 8, 9", "dim 0: nothing at y 2"]),
        ("f32[2 * 4@z]", ["dim 0  0:2  0, 2, 4, 6, 8, 10", "       2:4  1, 3, 5, 7, 9, 11"]),
    ],
)
def test_the_text_of_a_picture(text: str, rows: list[str]) -> None:
    assert str(mw.show(text, MESH)).splitlines()[HEADED : HEADED + len(rows)] == rows


def test_large_meshes_are_summarised_in_numbers() -> None:
    mesh = mw.ProcessMesh(np.arange(4096).reshape(64, 64), ["a", "b"])
    said = str(mw.show("f32[4096@a@b, 64]", mesh))
    assert "… 4080 more rows" in said
    assert "0, 1 … 63 (64)" in str(mw.show("f32[64@a]", mesh))
    assert "..." in str(
        mw.show(
            parse_spec("f32[64@x, 64@y, 64@z]", mw.ProcessMesh(np.arange(1000).reshape(10, 10, 10), ["x", "y", "z"]))
        )
    )
    many = Spec(mesh, Layout((Product(((1000, ()), (64, ("a",)))),)), (64000,), torch.float32)
    assert "dim 0, factor 1" in str(mw.show(many))


def test_tensors_and_models_are_shown() -> None:
    def program() -> tuple[Picture | Listing, Picture | Listing]:
        net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6))
        net[1].weight = mw.shard_tensor(net[1].weight, MESH, [mw.Shard(0)])
        return mw.show(net), mw.show(net[1].weight)

    model, weight = mw.simulate(program, 12)[5]
    assert [row.split() for row in str(model).splitlines()[2:5]] == [
        ["0.weight", "f32[6,", "4]", "plain", "96", "B", "96", "B"],
        ["0.bias", "f32[6]", "plain", "24", "B", "24", "B"],
        ["1.weight", "f32[6@x]", "24", "B", "12", "B"],
    ]
    assert isinstance(model, Listing)
    assert "<table>" in model._repr_html_()
    assert "dim 0  0:3  0, 1, 2, 3, 4, 5" in str(weight)
