"""Random meshes, layouts and specs."""

from __future__ import annotations

from math import prod

import hypothesis.strategies as st
import numpy as np
import torch

from meshwright.layout import PARTIAL_OPS, Dim, Layout, ProcessMesh, Product, Spec

AXES = ("x", "y", "z")
SIZES = (0, 1, 2, 3, 4, 5, 6, 8, 12)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint16)


@st.composite
def meshes(draw: st.DrawFn, most: int = 12, pool: int = 14) -> ProcessMesh:
    """Draw a mesh of 1 to 3 axes of 1 to 4 ranks, with at most `most` ranks in any order."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda s: prod(s) <= most))
    order = draw(st.permutations(range(pool)))
    return ProcessMesh(np.array(order[: prod(sizes)]).reshape(sizes), AXES[: len(sizes)])


@st.composite
def dims(draw: st.DrawFn, size: int, axes: tuple[str, ...]) -> Dim:
    """Draw a dim sharded by `axes`; sometimes a product of two factors."""
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    if not divisors or draw(st.booleans()):
        return axes
    first, split = draw(st.sampled_from(divisors)), draw(st.integers(0, len(axes)))
    return Product(((first, axes[:split]), (size // first, axes[split:])))


@st.composite
def layouts(draw: st.DrawFn, axes: tuple[str, ...], shape: tuple[int, ...]) -> Layout:
    """Draw a layout in which every axis has one of the four types, in any order."""
    cuts: list[list[str]] = [[] for _ in shape]
    partial: list[tuple[str, str]] = []
    varying: list[str] = []
    for axis in draw(st.permutations(axes)):
        role = draw(st.integers(-3, 2 * len(shape) - 1))
        if role >= 0:
            cuts[role // 2].append(axis)
        elif role == -1:
            partial.append((axis, draw(st.sampled_from(PARTIAL_OPS))))
        elif role == -2:
            varying.append(axis)
    made = tuple(draw(dims(n, tuple(c))) for n, c in zip(shape, cuts, strict=True))
    return Layout(made, tuple(partial), tuple(varying))


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """Draw a spec of 0 to 3 dims, which may be empty or uneven."""
    mesh = draw(meshes())
    shape = tuple(draw(st.lists(st.sampled_from(SIZES), max_size=3)))
    return Spec(mesh, draw(layouts(mesh.dim_names, shape)), shape, draw(st.sampled_from(DTYPES)))
