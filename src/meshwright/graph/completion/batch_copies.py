"""Copies of batch inputs for each mesh that reads them, possible because every rank has the whole batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshwright.layout import Layout, ProcessMesh
from meshwright.tensor import ReshardMark

from ..program.node import Node, Value
from ..program.program import Input, Program
from ..program.shape_inference import FreshNames

_Key = tuple[Value, ProcessMesh, Layout]


def copy_batch_inputs(program: Program) -> Program:
    """Return the captured program in which each mark of a plain batch leaf reads an input of its own mesh and layout.

    So the batch is not sent between meshes. Leaves that only one mesh reads are unchanged.
    """
    plain = {i.value: i for i in program.inputs if i.role == "batch" and i.spec is None}
    marks = _with_several_meshes(
        {n: n.op for n in program.nodes if isinstance(n.op, ReshardMark) and n.ins[0] in plain}
    )
    if not marks:
        return program
    names, copies = FreshNames(program.all_values()), dict[_Key, Input]()
    became: dict[Node, Node] = {}
    for node, mark in marks.items():
        v = node.ins[0]
        key = (v, mark.mesh, mark.layout)
        if key not in copies:
            name = names.fresh(v.name)
            copies[key] = replace(plain[v], value=replace(v, name=name), name=name)
        became[node] = _reading(node, copies[key].value)
    inputs = (*program.inputs, *copies.values())
    return replace(program, inputs=inputs, nodes=tuple(became.get(n, n) for n in program.nodes))


def _with_several_meshes(marks: Mapping[Node, ReshardMark]) -> dict[Node, ReshardMark]:
    """Return the marks whose operand has marks of more than one mesh."""
    meshes: dict[Value, set[ProcessMesh]] = {}
    for node, mark in marks.items():
        meshes.setdefault(node.ins[0], set()).add(mark.mesh)
    return {node: mark for node, mark in marks.items() if len(meshes[node.ins[0]]) > 1}


def _reading(node: Node, operand: Value) -> Node:
    return node.with_operands(lambda v: operand)
