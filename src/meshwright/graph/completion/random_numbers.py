"""Placement of random numbers that several pipeline stages read.

The first stage that reads the numbers draws them, and sends them to the other stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshwright.layout import ProcessMesh, replicated
from meshwright.tensor import ReshardMark

from ..program.effects import is_random_call
from ..program.node import Node, Value, map_values
from ..program.program import Program
from ..program.shape_inference import FreshNames

Readers = dict[Node, dict[ProcessMesh, None]]


def mark_shared_random_numbers(program: Program) -> Program:
    """Return the captured program with a mark on every random value that several meshes read.

    A node that draws on no mesh is marked with the mesh of its first reader.
    """
    first_mesh = {node: next(iter(meshes)) for node, meshes in _readers(program).items() if len(meshes) > 1}
    if not first_mesh:
        return program
    names = FreshNames(program.all_values())
    nodes: list[Node] = []
    became: dict[Value, Value] = {}
    for node in program.nodes:
        nodes.append(node.with_operands(lambda v: became.get(v, v)))
        for v in node.outs if node in first_mesh else ():
            became[v] = replace(v, name=names.fresh(v.name))
            nodes.append(
                Node(ReshardMark(first_mesh[node], replicated(len(v.shape))), (v,), {}, became[v], node.origin)
            )
    outputs = map_values(lambda v: became.get(v, v), program.outputs)
    return replace(program, nodes=tuple(nodes), outputs=outputs)


def _readers(program: Program) -> Readers:
    """Return, for each node that draws on no mesh, the meshes that read values computed from it, in program order."""
    mesh = {i.value: i.spec.mesh for i in program.inputs if i.spec is not None}
    drawn: dict[Value, frozenset[Node]] = {}
    found: Readers = {}
    for node in program.nodes:
        target = _mesh_of(node, mesh)
        makers = frozenset[Node]().union(*(drawn.get(v, ()) for v in node.ins))
        if target is None:
            drawn.update(dict.fromkeys(node.outs, makers | {node} if is_random_call(node) else makers))
            continue
        mesh.update(dict.fromkeys(node.outs, target))
        for maker in makers:
            found.setdefault(maker, {})[target] = None
    return found


def _mesh_of(node: Node, mesh: Mapping[Value, ProcessMesh]) -> ProcessMesh | None:
    """Return the mesh of a mark, or the mesh of the first operand that has one."""
    if isinstance(node.op, ReshardMark):
        return node.op.mesh
    return next((mesh[v] for v in node.ins if v in mesh), None)
