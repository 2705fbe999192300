"""Random meshes and layouts, and tensors in these layouts."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import torch
from torch import Tensor

import meshwright as mw
from meshwright.layout import Dim, Layout, ProcessMesh, Product
from meshwright.tensor import distribute_as

AXES = ("x", "y", "z")


@st.composite
def meshes(draw: st.DrawFn) -> ProcessMesh:
    """Draw a mesh of up to 8 ranks from a world of 9, in any order."""
    shape = draw(st.sampled_from([(1,), (2,), (3,), (5,), (2, 2), (2, 3), (3, 2), (2, 2, 2)]))
    ranks = draw(st.permutations(range(9)))[: prod(shape)]
    return ProcessMesh(np.array(ranks).reshape(shape), AXES[: len(shape)])


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...], mesh: ProcessMesh) -> Layout:
    """Draw a layout with any shardings: several axes on one dim in any order, and product dims."""
    homes: dict[int, list[str]] = {}
    for axis in draw(st.permutations(mesh.dim_names)):
        homes.setdefault(draw(st.integers(0, len(shape))), []).append(axis)
    dims: list[Dim] = []
    for at, n in enumerate(shape):
        axes = tuple(homes.get(at, ()))
        factor = draw(st.sampled_from([f for f in (1, 2, 3) if n > f and n % f == 0] or [1]))
        inner = draw(st.booleans())
        dims.append(
            Product(((factor, () if inner else axes), (n // factor, axes if inner else ()))) if factor > 1 else axes
        )
    return Layout(tuple(dims))


@st.composite
def journeys(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[ProcessMesh, Layout], tuple[ProcessMesh, Layout]]:
    """Draw a shape, and the meshes and layouts of a tensor when it is saved and when it is loaded."""
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 6, 7, 12]), max_size=3)))
    one, other = draw(meshes()), draw(meshes())
    return shape, (one, draw(layouts(shape, one))), (other, draw(layouts(shape, other)))


def numbered(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.arange(prod(shape)) + 1).reshape(shape).to(dtype)


def laid(x: Tensor, where: tuple[ProcessMesh, Layout]) -> Any:
    return distribute_as(x, *where)


def saved(path: Path, state: dict[str, Any], **how: Any) -> Path:
    """Save the state of one device, and return the path of the checkpoint."""
    return mw.save_state_dict(state, path, **how).path
