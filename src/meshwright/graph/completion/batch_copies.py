"""Copies of batch inputs for each mesh that reads them, possible because every rank has the whole batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.layout import Layout, ProcessMesh
from meshwright.tensor import ReshardMark

from ..program.node import Node, Value, map_values
from ..program.program import Input, Program
from ..program.shape_inference import FreshNames

_Copies = dict[tuple[Value, ProcessMesh, Layout], Input]


def copy_batch_inputs(program: Program) -> Program:
    """Return the captured program in which each mark of a plain batch leaf reads an input of its own mesh and layout.

    So the batch is not sent between meshes. Leaves that only one mesh reads are unchanged.
    """
    plain = {i.value: i for i in program.inputs if i.role == "batch" and i.spec is None}
    marks = [n for n in program.nodes if isinstance(n.op, ReshardMark) and n.ins[0] in plain]
    meshes: dict[Value, set[ProcessMesh]] = {}
    for node in marks:
        meshes.setdefault(node.ins[0], set()).add(_mark(node).mesh)
    names = FreshNames(
        iter([*(i.value.name for i in program.inputs), *(v.name for n in program.nodes for v in n.outs)])
    )
    copies: _Copies = {}
    became: dict[Node, Node] = {}
    for node in marks:
        given = plain[node.ins[0]]
        if len(meshes[given.value]) > 1:
            became[node] = _reading(node, _copy(given, node, names, copies))
    inputs = (*program.inputs, *copies.values())
    return replace(program, inputs=inputs, nodes=tuple(became.get(n, n) for n in program.nodes)) if became else program


def _mark(node: Node) -> Any:
    return node.op


def _copy(given: Input, node: Node, names: FreshNames, copies: _Copies) -> Input:
    op, v = _mark(node), given.value
    key = (v, op.mesh, op.layout)
    if key not in copies:
        name = names.fresh(v.name)
        copies[key] = replace(given, value=Value(name, v.shape, v.dtype, v.device), name=name)
    return copies[key]


def _reading(node: Node, given: Input) -> Node:
    args, kwargs = map_values(lambda v: given.value, (node.args, dict(node.kwargs)))
    return replace(node, args=args, kwargs=kwargs)
