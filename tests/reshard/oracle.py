"""Meaning of a distributed tensor: splitting a whole tensor into local parts, and joining parts to the whole."""

from __future__ import annotations

from math import prod
from typing import Any

import hypothesis.strategies as st
import numpy as np
import torch
from torch import Tensor

from meshwright.comm import Counters, current_communicator, simulate
from meshwright.layout import Dim, Layout, ProcessMesh, Product, Spec, expand_products
from meshwright.reshard import ConversionPlan, execute

AXES = ("x", "y", "z")
RANKS_OUTSIDE = 1
"""Ranks of each conversion that are in neither mesh."""
OPS = {
    torch.float64: ("sum", "sum", "avg", "max", "min", "prod"),
    torch.int64: ("sum", "max", "min", "prod"),
    torch.bool: ("any", "all"),
}
JOINS = {
    "sum": lambda t: t.sum(0).to(t.dtype),
    "avg": lambda t: t.mean(0),
    "max": lambda t: t.amax(0),
    "min": lambda t: t.amin(0),
    "prod": lambda t: t.prod(0).to(t.dtype),
    "any": lambda t: t.any(0),
    "all": lambda t: t.all(0),
}


def join(terms: list[Tensor], op: str) -> Tensor:
    return JOINS[op](torch.stack(terms))


def whole(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.rand(shape) > 0.5 if dtype == torch.bool else torch.randint(-5, 6, shape).to(dtype)


def terms(x: Tensor, op: str, n: int) -> list[Tensor]:
    """Return n different tensors that `op` combines to x."""

    def some(low: int, high: int) -> list[Tensor]:
        return [torch.randint(low, high, x.shape).to(x.dtype) for _ in range(n - 1)]

    if op in ("sum", "avg"):
        others = some(-4, 5)
        return [*others, (x if op == "sum" else n * x) - sum(others, torch.zeros_like(x))]
    if op == "prod":
        return [torch.ones_like(x)] * (n - 1) + [x]
    if op in ("max", "min"):
        return [x - t if op == "max" else x + t for t in some(0, 3)] + [x]
    coins = [torch.rand(x.shape) > 0.5 for _ in range(n - 1)]
    return [x & t if op == "any" else x | t for t in coins] + [x]


def take_apart(spec: Spec, x: Tensor) -> dict[int, Tensor]:
    """Return a local part for every rank of the mesh, so that `glue` gives x."""
    values: dict[tuple[int, ...], Tensor] = {(): x}
    for axis, op in reversed(spec.layout.partial):
        n = spec.mesh.sizes[axis]
        values = {(i, *at): t for at, v in values.items() for i, t in enumerate(terms(v, op, n))}
    factors = expand_products(spec.shape, spec.layout)[0]
    parts: dict[int, Tensor] = {}
    for rank in spec.mesh.process_ids:
        where = spec.mesh.coordinate(rank)
        value = values[tuple(where[a] for a in spec.layout.partial_axes)].reshape(factors)
        box = tuple(slice(i, i + n) for i, n in spec.local_ranges(rank))
        parts[rank] = value[box].reshape(spec.local_shape(rank)).clone()
    return parts


def glue(spec: Spec, parts: dict[int, Tensor]) -> Tensor:
    """Return the global value; fails if replicas differ, or if nobody holds an element."""
    held = {tuple(spec.mesh.coordinate(rank).items()): parts[rank] for rank in spec.mesh.process_ids}
    for axis, op in spec.layout.partial:
        lines: dict[Any, list[Tensor]] = {}
        for at, part in held.items():
            lines.setdefault(tuple((a, 0 if a == axis else i) for a, i in at), []).append(part)
        held = {at: join(line, op) for at, line in lines.items()}
    factors = expand_products(spec.shape, spec.layout)[0]
    out, seen = torch.zeros(factors, dtype=spec.dtype), torch.zeros(factors, dtype=torch.bool)
    for at, part in held.items():
        rank = int(spec.mesh.mesh[tuple(i for _, i in at)])
        box = tuple(slice(i, i + n) for i, n in spec.local_ranges(rank))
        piece = part.reshape(out[box].shape)
        replica = torch.where(seen[box], out[box], piece)
        if not torch.equal(replica, piece):  # the comparison with tolerances takes ten times as long
            torch.testing.assert_close(replica, piece)
        out[box], seen[box] = piece, True
    assert seen.all(), "an element that no rank holds"
    return out.reshape(spec.shape)


def carry_out(made: ConversionPlan, parts: dict[int, Tensor]) -> tuple[dict[int, Tensor], dict[int, Counters]]:
    """Return the parts after the plan, and every communicator's counts; ranks outside the source start with nothing."""
    size = max(made.ranks) + 1 + RANKS_OUTSIDE

    def program() -> tuple[Tensor, Counters]:
        communicator = current_communicator()
        local = parts.get(communicator.rank)
        if local is None:
            local = torch.empty(made.src.local_shape(communicator.rank), dtype=made.src.dtype)
        with torch.no_grad():
            return execute(made, local, communicator), communicator.seen

    found = simulate(program, size)
    return {r: t for r, (t, _) in enumerate(found)}, {r: seen for r, (_, seen) in enumerate(found)}


@st.composite
def meshes(draw: st.DrawFn, ranks: int = 12, pool: int = 0) -> ProcessMesh:
    """Draw a mesh of 1 to 3 axes of 1 to 4, at most `ranks` ranks in any order, taken out of `pool` if there is one."""
    sizes = draw(st.lists(st.sampled_from((1, 2, 2, 3, 4)), min_size=1, max_size=3).filter(lambda s: prod(s) <= ranks))
    order = draw(st.permutations(range(max(pool, prod(sizes)))))
    return ProcessMesh(np.array(order[: prod(sizes)]).reshape(sizes), AXES[: len(sizes)])


@st.composite
def dims(draw: st.DrawFn, size: int, axes: list[str], products: bool) -> Dim:
    """Draw a dim sharded by `axes`, and sometimes a product of two factors that share the axes."""
    divisors = [d for d in range(2, size) if size % d == 0]
    if not (products and divisors and draw(st.integers(0, 3)) == 0):
        return tuple(axes)
    first, split = draw(st.sampled_from(divisors)), draw(st.integers(0, len(axes)))
    return Product(((first, tuple(axes[:split])), (size // first, tuple(axes[split:]))))


@st.composite
def layouts(
    draw: st.DrawFn, mesh: ProcessMesh, shape: tuple[int, ...], ops: tuple[str, ...], products: bool = True
) -> Layout:
    """Draw any layout: several axes on one dim in any order, terms, varying replication, products."""
    roles: list[list[str]] = [[] for _ in shape]
    partial: list[tuple[str, str]] = []
    varying: list[str] = []
    for axis in draw(st.permutations(mesh.dim_names)):
        role = draw(st.integers(-3, 2 * len(shape) - 1))
        if role >= 0:
            roles[role // 2].append(axis)
        elif role == -1:
            partial.append((axis, draw(st.sampled_from(ops))))
        elif role == -2:
            varying.append(axis)
    cut = tuple(draw(dims(n, axes, products)) for n, axes in zip(shape, roles, strict=True))
    return Layout(cut, tuple(partial), tuple(varying))


@st.composite
def conversions(draw: st.DrawFn, across: bool = False, linear: bool = False) -> tuple[Spec, Spec]:
    """Draw two specs of one tensor, on one mesh or on two that may overlap."""
    dtype = torch.float64 if linear else draw(st.sampled_from((torch.float64, torch.float64, *OPS)))
    ops = ("sum",) if linear else OPS[dtype]
    shape = tuple(draw(st.lists(st.sampled_from((1, 2, 3, 4, 5, 6, 8, 12, 0)), max_size=3)))
    here = draw(meshes(pool=13 if across else 0))
    there = draw(meshes(pool=13)) if across else here
    return tuple(Spec(mesh, draw(layouts(mesh, shape, ops)), shape, dtype) for mesh in (here, there))
