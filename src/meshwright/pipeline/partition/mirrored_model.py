"""The second copy of a model in a bidirectional pipeline: every stage on the ranks of the opposite stage.

Parameters stay where they are. A mark sends their values to the copy once per step, and its backward returns the
gradients. This is a conversion between meshes like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np

from meshwright.graph import Node, Operator, Origin, Program, Value, map_values
from meshwright.layout import ProcessMesh, Spec
from meshwright.tensor import ReshardMark

from .._errors import StageError
from .stages import Stages


def mirrored(program: Program, stages: Stages) -> Program:
    """Return the captured program on the opposite meshes.

    Raises StageError for a model that cannot have a second copy.
    """
    if program.writes:
        raise StageError(
            "two copies of a model",
            f"the buffer {program.writes[0][0]!r}, which each batch updates",
            "each copy would update its own buffer",
            "use a schedule with one copy, such as ZB-V",
        )
    opposite = _opposite(stages)
    became: dict[Value, Value] = {}
    marks: list[Node] = []
    specs = {v: _moved(spec, opposite) for v, spec in program.specs.items()}
    inputs = tuple(
        i if i.spec is None or i.role != "batch" else replace(i, spec=specs[i.value]) for i in program.inputs
    )
    for given in program.inputs:
        if given.role in ("parameter", "buffer") and given.spec is not None:
            v = given.value
            became[v] = Value(f"{v.name}_opposite", v.shape, v.dtype, v.device)
            marks.append(Node(ReshardMark(opposite(given.spec.mesh), given.spec.layout), (v,), {}, became[v], Origin()))
            specs[became[v]], specs[v] = specs[v], given.spec
    nodes = tuple(_node(node, became, opposite) for node in program.nodes)
    return replace(program, inputs=inputs, nodes=(*marks, *nodes), specs=specs)


def _opposite(stages: Stages) -> Callable[[ProcessMesh], ProcessMesh]:
    ranks = stages.ranks
    to = {r: s for here, there in zip(ranks, reversed(ranks), strict=True) for r, s in zip(here, there, strict=False)}
    uneven = next((pair for pair in zip(ranks, reversed(ranks), strict=True) if len(pair[0]) != len(pair[1])), None)
    if uneven is not None:
        raise StageError(
            "two copies of a model",
            f"stages of {len(uneven[0])} and of {len(uneven[1])} ranks opposite each other",
            "the copy of a stage is on the ranks of the opposite stage",
            "use stages of equal size, or a schedule with one copy",
        )

    @cache
    def opposite(mesh: ProcessMesh) -> ProcessMesh:
        return ProcessMesh(np.vectorize(to.__getitem__)(mesh.mesh), list(mesh.dim_names))

    return opposite


def _moved(spec: Spec, opposite: Callable[[ProcessMesh], ProcessMesh]) -> Spec:
    return Spec(opposite(spec.mesh), spec.layout, spec.shape, spec.dtype)


def _node(node: Node, became: dict[Value, Value], opposite: Callable[[ProcessMesh], ProcessMesh]) -> Node:
    args, kwargs = map_values(lambda v: became.get(v, v), (node.args, dict(node.kwargs)))
    op = ReshardMark(opposite(node.op.mesh), node.op.layout) if isinstance(node.op, ReshardMark) else node.op
    if not isinstance(op, (ReshardMark, Operator)):
        raise StageError(
            "two copies of a model",
            f"{op!r} {node.origin.where}".rstrip(),
            "the operator may contain meshes",
            "use a schedule with one copy, such as ZB-V",
        )
    return Node(op, args, kwargs, node.out, node.origin)
