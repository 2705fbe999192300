"""A dim with several factors is written without a product if both layouts are the same."""

from __future__ import annotations

from itertools import product
from math import prod

import hypothesis.strategies as st
import torch
from hypothesis import given

from meshwright.layout import Layout, ProcessMesh, Product, Spec, axes_of, expand_products
from meshwright.spmd import bind, layout_dim
from meshwright.spmd.derivation.sharding_choices import factor_axes
from meshwright.spmd.notation.rule import Rule

MESH = ProcessMesh([[0, 1], [2, 3], [4, 5]], ["x", "y"])


def held(spec: Spec, rank: int) -> list[int]:
    """Return the flat indices of the elements that a rank holds."""
    shape = expand_products(spec.shape, spec.layout)[0]
    box = tuple(slice(start, start + n) for start, n in spec.local_ranges(rank))
    return torch.arange(prod(shape)).view(shape)[box].flatten().tolist()


CUTS = [(), ("x",), ("y",), ("x", "y"), ("y", "x")]
PAIRS = [pair for pair in product(CUTS, CUTS) if not set(pair[0]) & set(pair[1])]


@given(st.integers(2, 12), st.integers(2, 7), st.sampled_from(PAIRS))
def test_ranks_hold_the_same_elements(outer, inner, cuts):
    bound = bind(Rule("a b -> (a b)"), [(outer, inner)])
    (dims,) = bound.outs
    dim = layout_dim(dims[0], dict(zip(dims[0], cuts, strict=True)), bound, MESH.sizes)
    written = Spec(MESH, Layout((dim,)), (outer * inner,), torch.float32)
    exact = Product(((outer, cuts[0]), (inner, cuts[1])))
    meant = Spec(MESH, Layout((exact,)), (outer * inner,), torch.float32)
    assert [held(written, r) for r in range(6)] == [held(meant, r) for r in range(6)]
    assert axes_of(dim) == (*cuts[0], *cuts[1])
    even = not cuts[1] and outer % prod(MESH.sizes[a] for a in cuts[0]) == 0
    assert isinstance(dim, Product) != even
    back = factor_axes((dims[0],), Layout((dim,)), bound, MESH.sizes)
    assert {f: axes for f, axes in back.items() if axes} == {
        f: axes for f, axes in zip(dims[0], cuts, strict=True) if axes
    }
