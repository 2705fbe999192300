"""Placement of random numbers that several pipeline stages read.

The first stage that reads the numbers draws them, and sends them to the other stages.
"""

from __future__ import annotations

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
    homes = {node: next(iter(meshes)) for node, meshes in _readers(program).items() if len(meshes) > 1}
    if not homes:
        return program
    taken = [v.name for node in program.nodes for v in node.outs]
    names = FreshNames(iter([*(i.value.name for i in program.inputs), *taken]))
    nodes: list[Node] = []
    became: dict[Value, Value] = {}
    for node in program.nodes:
        args, kwargs = map_values(lambda v: became.get(v, v), (node.args, dict(node.kwargs)))
        nodes.append(replace(node, args=args, kwargs=kwargs))
        for v in node.outs if node in homes else ():
            became[v] = replace(v, name=names.fresh(v.name))
            nodes.append(Node(ReshardMark(homes[node], replicated(len(v.shape))), (v,), {}, became[v], node.origin))
    outputs = map_values(lambda v: became.get(v, v), program.outputs)
    return replace(program, nodes=tuple(nodes), outputs=outputs)


def _readers(program: Program) -> Readers:
    """Return, for each node that draws on no mesh, the meshes that read values computed from it, in program order."""
    mesh = {i.value: i.spec.mesh for i in program.inputs if i.spec is not None}
    drawn: dict[Value, frozenset[Node]] = {}
    found: Readers = {}
    for node in program.nodes:
        own = node.op.mesh if isinstance(node.op, ReshardMark) else None
        target = own or next((mesh[v] for v in node.ins if v in mesh), None)
        makers = frozenset[Node]().union(*(drawn.get(v, ()) for v in node.ins))
        if target is not None:
            mesh.update(dict.fromkeys(node.outs, target))
            for maker in makers:
                found.setdefault(maker, {})[target] = None
        elif makers or is_random_call(node):
            drawn.update(dict.fromkeys(node.outs, makers | {node} if is_random_call(node) else makers))
    return found
