"""Sends between pipeline stages in a captured program: every operand moves to the mesh of the node that reads it.

A node runs on one of the meshes of its operands: the one that a `reshard` reached last in program order. An operand on
another mesh is sent to that mesh once, with its layout unchanged. A value computed from plain leaves of the batch alone
is on no mesh. It is computed once for each mesh that reads it, because every rank has the whole batch. Constants are
on every rank as well. Random numbers on no mesh are drawn for the stage that reads them first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.layout import Layout, ProcessMesh
from meshwright.tensor import DistTensor, ReshardMark, StageArrival, redistribute

from ..program.effects import is_random_call
from ..program.node import Node, Value, WriteToCopies, map_values, values_in
from ..program.program import Input, Program
from ..program.shape_inference import FreshNames
from .random_numbers import mark_shared_random_numbers

MeshOfValue = dict[Value, ProcessMesh]


@dataclass(frozen=True, slots=True)
class StageSend:
    """Operator that sends a tensor to the mesh of another stage with its layout unchanged.

    It becomes a `ReshardMark` once layouts are known.
    """

    mesh: ProcessMesh

    def __call__(self, x: DistTensor) -> DistTensor:
        return redistribute(x, self.mesh, Layout(x.spec.layout.dims))

    def __repr__(self) -> str:
        return f"sent to {self.mesh!r}"


def meshes_of(program: Program) -> set[ProcessMesh]:
    """Return the meshes of the inputs and marks of a captured program."""
    inputs = {i.spec.mesh for i in program.inputs if i.spec is not None}
    return inputs | {node.op.mesh for node in program.nodes if isinstance(node.op, ReshardMark)}


def with_stage_sends(program: Program) -> Program:
    """Return the captured program with sends, so that all operands of a node are on one mesh.

    The layouts of sent operands are not decided yet.
    """
    program = mark_shared_random_numbers(program)
    found = _Bringing(program, *_placed(program))
    nodes = tuple(found.nodes())
    writes = tuple((x, found.renewed(x, v)) for x, v in program.writes)
    nodes, inputs = (*nodes, *found.made), (*program.inputs, *found.copies)
    return replace(program, inputs=inputs, nodes=nodes, writes=writes)


def _placed(program: Program) -> tuple[MeshOfValue, set[Value]]:
    """Return the mesh of each value, and the values that are on no mesh because they depend on the batch alone.

    A value on no mesh is assigned the mesh of its first reader.
    """
    mesh: MeshOfValue = {i.value: i.spec.mesh for i in program.inputs if i.spec is not None}
    free = {i.value for i in program.inputs if i.role == "batch" and i.spec is None}
    came: dict[ProcessMesh, int] = {}
    reads: list[tuple[Node, ProcessMesh]] = []
    for number, node in enumerate(program.nodes):
        target = node.op.mesh if isinstance(node.op, ReshardMark) else _latest(node, mesh, came)
        if isinstance(node.op, ReshardMark):
            came[node.op.mesh] = number
        if target is not None:
            mesh.update(dict.fromkeys(node.outs, target))
            reads.append((node, target))
        elif free.intersection(node.ins) and not is_random_call(node):
            free.update(node.outs)
    for node, target in reads:
        _assign_mesh([v for v in node.ins if v in free], target, program, mesh, free)
    return mesh, free


def _latest(node: Node, mesh: MeshOfValue, came: dict[ProcessMesh, int]) -> ProcessMesh | None:
    """Return the mesh of the node's written operands, else the mesh of its operands that the program reached last."""
    written = [v for v in _written(node) if v in mesh]
    meshes = dict.fromkeys(mesh[v] for v in written or node.ins if v in mesh)
    return max(meshes, key=lambda m: came.get(m, -1), default=None)


def _written(node: Node) -> list[Value]:
    """Return the operands that the node's operator writes to."""
    if not isinstance(node.op, WriteToCopies):
        return []
    held: list[Any] = []
    for place in node.op.places:
        at = place[0] if isinstance(place, tuple) else place
        held.append(node.kwargs.get(at) if isinstance(at, str) else node.args[at])
    return list(values_in(held))


def _assign_mesh(read: list[Value], target: ProcessMesh, program: Program, mesh: MeshOfValue, free: set[Value]) -> None:
    """Assign `target` to the values in `read` that have no mesh yet, and to the values they are computed from."""
    left = [v for v in read if v not in mesh]
    while left:
        v = left.pop()
        mesh[v] = target
        maker = program.producers.get(v)
        if maker is not None:
            mesh.update(dict.fromkeys(maker.outs, target))
            left += [x for x in maker.ins if x in free and x not in mesh]


@dataclass
class _Bringing:
    program: Program
    mesh: MeshOfValue
    free: set[Value]
    copies: list[Input] = field(default_factory=list[Input])
    made: list[Node] = field(default_factory=list[Node])
    there: dict[tuple[Value, ProcessMesh], Value] = field(default_factory=dict[tuple[Value, ProcessMesh], Value])

    def __post_init__(self) -> None:
        taken = [v.name for node in self.program.nodes for v in node.outs]
        self.names = FreshNames(iter([*(i.value.name for i in self.program.inputs), *taken]))
        self.given = {i.value: i for i in self.program.inputs}

    def nodes(self) -> Iterator[Node]:
        """Yield the nodes; the nodes that send or recompute an operand come before its reader."""
        for node in self.program.nodes:
            target = node.op.mesh if isinstance(node.op, ReshardMark) else self._of(node)
            new = node if target is None else self._reading(self._settled(node), target)
            yield from self.made
            self.made.clear()
            yield new

    def renewed(self, buffer: Value, v: Value) -> Value:
        """Return the new value of a buffer, on the mesh of the buffer."""
        home = self.mesh.get(buffer)
        return v if home is None or v not in self.program.producers else self._on(v, home, self.program.producers[v])

    def _settled(self, node: Node) -> Node:
        """Return the node with an `StageArrival` resolved.

        It becomes `StageSend` if the operand's mesh has the same dim names as the stage's mesh, else `ReshardMark`.
        """
        if not isinstance(node.op, StageArrival):
            return node
        (x,), home = node.ins, node.op.mesh
        as_it_lies = x in self.mesh and x not in self.free and self.mesh[x].dim_names == home.dim_names
        return replace(node, op=StageSend(home) if as_it_lies else ReshardMark(home, node.op.layout))

    def _of(self, node: Node) -> ProcessMesh | None:
        return next((self.mesh[v] for v in node.outs if v in self.mesh), None)

    def _reading(self, node: Node, target: ProcessMesh) -> Node:
        """Return the node with all operands on `target`. `ReshardMark` and `StageSend` move their own operand."""
        sends = isinstance(node.op, (ReshardMark, StageSend))
        away = {v: self._on(v, target, node) for v in node.ins if v in self.free or not sends}
        if all(v is x for v, x in away.items()):
            return node
        args, kwargs = map_values(lambda v: away.get(v, v), (node.args, dict(node.kwargs)))
        return replace(node, args=args, kwargs=kwargs)

    def _on(self, v: Value, target: ProcessMesh, reader: Node) -> Value:
        """Return `v` on the mesh of its reader, sent there or recomputed there."""
        if not v.is_tensor or self.mesh.get(v, target) is target:
            return v
        key = (v, target)
        if key not in self.there and v in self.free:
            self._make_again(v, target)
        elif key not in self.there:
            self.there[key] = self._fresh(v)
            self.made.append(Node(StageSend(target), (v,), {}, self.there[key], reader.origin))
        return self.there[key]

    def _fresh(self, v: Value) -> Value:
        return replace(v, name=self.names.fresh(v.name))

    def _make_again(self, v: Value, target: ProcessMesh) -> None:
        """Recompute on `target` a value that depends on the batch alone."""
        if v in self.given:
            new = self._fresh(v)
            self.copies.append(replace(self.given[v], value=new, name=new.name))
            self.there[v, target] = new
            return
        maker = self._reading(self.program.producers[v], target)
        self.there.update(((out, target), self._fresh(out)) for out in maker.outs)
        self.made.append(replace(maker, out=map_values(lambda out: self.there[out, target], maker.out)))
