"""Sends between pipeline stages in a captured program: every operand moves to the mesh of the node that reads it.

A node runs on one of the meshes of its operands: the one that a `reshard` reached last in program order. A node that
computes the new value of a parameter or buffer runs on the mesh of that tensor, as in eager mode. An operand on
another mesh is sent to that mesh once, with its layout unchanged. A value computed from plain leaves of the batch alone
is on no mesh. It is computed once for each mesh that reads it, because every rank has the whole batch. Constants are
on every rank as well. Random numbers on no mesh are drawn for the stage that reads them first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from meshwright.layout import Layout, ProcessMesh
from meshwright.tensor import DistTensor, ReshardMark, StageArrival, redistribute

from ..program.effects import is_random_call
from ..program.node import Node, Value, WriteToCopies, argument_at, map_values, values_in
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
    meshes, free = _assigned_meshes(program)
    sends = _StageSends(program, meshes, free)
    nodes = tuple(sends.nodes())
    writes = tuple((x, sends.written_back(x, v)) for x, v in program.writes)
    nodes, inputs = (*nodes, *sends.added), (*program.inputs, *sends.copies)
    return replace(program, inputs=inputs, nodes=nodes, writes=writes)


def _assigned_meshes(program: Program) -> tuple[MeshOfValue, set[Value]]:
    """Return the mesh of each value, and the values that are on no mesh because they depend on the batch alone.

    A value on no mesh is assigned the mesh of its first reader.
    """
    meshes: MeshOfValue = {i.value: i.spec.mesh for i in program.inputs if i.spec is not None}
    free = {i.value for i in program.inputs if i.role == "batch" and i.spec is None}
    homes = _homes_of_new_values(program, meshes)
    reached: dict[ProcessMesh, int] = {}
    reads: list[tuple[Node, ProcessMesh]] = []
    for number, node in enumerate(program.nodes):
        if isinstance(node.op, ReshardMark):
            reached[node.op.mesh] = number
        target = _mesh_of_node(node, meshes, reached, homes)
        if target is not None:
            meshes.update(dict.fromkeys(node.outs, target))
            reads.append((node, target))
        elif free.intersection(node.ins) and not is_random_call(node):
            free.update(node.outs)
    for node, target in reads:
        _assign_mesh(node.ins, target, program, meshes, free)
    return meshes, free


def _homes_of_new_values(program: Program, meshes: MeshOfValue) -> MeshOfValue:
    """Return the mesh of the parameter or buffer for each value that becomes its new value."""
    return {v: meshes[x] for x, v in program.writes if x in meshes}


def _mesh_of_node(
    node: Node, meshes: MeshOfValue, reached: Mapping[ProcessMesh, int], homes: Mapping[Value, ProcessMesh]
) -> ProcessMesh | None:
    """Return the mesh of a mark or of the tensors that the node writes, else the operands' mesh that was reached last.

    `homes` has the mesh of the parameter or buffer whose new value a value is.
    """
    if isinstance(node.op, ReshardMark):
        return node.op.mesh
    given = dict.fromkeys(meshes[v] for v in node.ins if v in meshes)
    renewed = [homes[v] for v in node.outs if homes.get(v) in given]
    if renewed:
        return renewed[0]
    written = dict.fromkeys(meshes[v] for v in _written_operands(node) if v in meshes)
    return max(written or given, key=lambda mesh: reached.get(mesh, -1), default=None)


def _written_operands(node: Node) -> Iterator[Value]:
    """Yield the operands that the node's operator writes to."""
    for place in node.op.places if isinstance(node.op, WriteToCopies) else ():
        argument = place[0] if isinstance(place, tuple) else place
        yield from values_in(argument_at(argument, node.args, node.kwargs))


def _assign_mesh(
    read: Sequence[Value], target: ProcessMesh, program: Program, meshes: MeshOfValue, free: set[Value]
) -> None:
    """Assign `target` to the free values in `read` that have no mesh yet, and to the values they are computed from."""
    left = list(read)
    while left:
        v = left.pop()
        if v in free and v not in meshes:
            meshes[v] = target
            maker = program.producers.get(v)
            if maker is not None:
                meshes.update(dict.fromkeys(maker.outs, target))
                left += maker.ins


@dataclass
class _StageSends:
    """Copies of values on other meshes: sent there, or recomputed there if they depend on the batch alone."""

    program: Program
    mesh: MeshOfValue
    free: set[Value]
    copies: list[Input] = field(default_factory=list[Input])
    added: list[Node] = field(default_factory=list[Node])
    """Nodes that send or recompute a value, which come before the next node."""
    on_mesh: dict[tuple[Value, ProcessMesh], Value] = field(default_factory=dict[tuple[Value, ProcessMesh], Value])

    def __post_init__(self) -> None:
        self.names = FreshNames(self.program.all_values())
        self.given = {i.value: i for i in self.program.inputs}

    def nodes(self) -> Iterator[Node]:
        """Yield the nodes; the nodes that send or recompute an operand come before its reader."""
        for node in self.program.nodes:
            target = next((self.mesh[v] for v in node.outs if v in self.mesh), None)
            new = node if target is None else self._reading(self._resolved(node), target)
            yield from self.added
            self.added.clear()
            yield new

    def written_back(self, buffer: Value, v: Value) -> Value:
        """Return the new value of a buffer, on the mesh of the buffer."""
        home, maker = self.mesh.get(buffer), self.program.producers.get(v)
        return v if home is None or maker is None else self._value_on(v, home, maker)

    def _resolved(self, node: Node) -> Node:
        """Return the node with an `StageArrival` resolved.

        It becomes `StageSend` if the operand's mesh has the same dim names as the stage's mesh, else `ReshardMark`.
        """
        if not isinstance(node.op, StageArrival):
            return node
        (x,), home = node.ins, node.op.mesh
        keeps_layout = x in self.mesh and x not in self.free and self.mesh[x].dim_names == home.dim_names
        return replace(node, op=StageSend(home) if keeps_layout else ReshardMark(home, node.op.layout))

    def _reading(self, node: Node, target: ProcessMesh) -> Node:
        """Return the node with all operands on `target`. `ReshardMark` and `StageSend` move their own operand."""
        sends = isinstance(node.op, (ReshardMark, StageSend))
        moved = {v: self._value_on(v, target, node) for v in node.ins if v in self.free or not sends}
        if all(v is x for v, x in moved.items()):
            return node
        return node.with_operands(lambda v: moved.get(v, v))

    def _value_on(self, v: Value, target: ProcessMesh, reader: Node) -> Value:
        """Return `v` on the mesh of its reader, sent there or recomputed there."""
        if not v.is_tensor or self.mesh.get(v, target) is target:
            return v
        key = (v, target)
        if key not in self.on_mesh and v in self.free:
            self._recompute(v, target)
        elif key not in self.on_mesh:
            self.on_mesh[key] = self._renamed(v)
            self.added.append(Node(StageSend(target), (v,), {}, self.on_mesh[key], reader.origin))
        return self.on_mesh[key]

    def _renamed(self, v: Value) -> Value:
        return replace(v, name=self.names.fresh(v.name))

    def _recompute(self, v: Value, target: ProcessMesh) -> None:
        """Recompute on `target` a value that depends on the batch alone."""
        if v in self.given:
            new = self._renamed(v)
            self.copies.append(replace(self.given[v], value=new, name=new.name))
            self.on_mesh[v, target] = new
            return
        maker = self._reading(self.program.producers[v], target)
        self.on_mesh.update(((out, target), self._renamed(out)) for out in maker.outs)
        self.added.append(replace(maker, out=map_values(lambda out: self.on_mesh[out, target], maker.out)))
