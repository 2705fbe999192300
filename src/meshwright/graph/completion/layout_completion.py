"""Completion of layouts: marks are propagated forward and backward through the program until nothing changes.

Marks are inputs with a spec and `reshard` calls. The forward sweep decides each operator's layout as eager mode does;
unmarked operands take the cheapest layout. The backward sweep derives the wanted layout of unmarked operands from the
known layout of a result. If uses want different layouts of an unmarked tensor, the layout that moves fewest bytes is
taken, gradients included. The order of nodes decides only ties. Values that no mark reaches are replicated.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from meshwright.layout import Layout, ProcessMesh, Spec, TorchValue, hint, replicated
from meshwright.reshard import plan, transposed
from meshwright.spmd import OperatorCall, RuleError, describe_for_propagation, split_sharded_products
from meshwright.tensor import Decision, ReshardMark, decide

from ..program.layouts import Layouts
from ..program.node import Node, Value, tensor_dtype
from ..program.program import Program
from ..torch_hooks import Operator
from .stage_sends import StageSend


def complete(program: Program, given: Mapping[str, Spec] | None = None) -> Layouts:
    """Return the layouts of all values of the captured `program`.

    `given` maps names of inputs to specs; these override the program's marks and add to them.
    """
    marks = {i.value.name: i.spec for i in program.inputs if i.spec is not None} | dict(given or {})
    reasons = dict.fromkeys(marks, "mark")
    state = _State.of(program, marks, reasons)
    while more := state.wanted_cut(reasons):
        marks |= more
        reasons |= dict.fromkeys(more, "uses")
        state = _State.of(program, marks, reasons)
    specs = {v.name: spec for v, spec in state.known.items()}
    return Layouts(specs, {v.name: why for v, why in state.reasons.items()})


def with_layouts(program: Program, layouts: Layouts) -> Program:
    """Return the captured program with the completed layouts on its inputs and values."""
    inputs = tuple(
        replace(i, spec=layouts.specs.get(i.value.name, i.spec)) if i.role != "constant" else i for i in program.inputs
    )
    specs = {v: layouts.specs[v.name] for v in program.all_values() if v.name in layouts.specs}
    return replace(
        program, inputs=inputs, nodes=tuple(_with_resolved_send(n, layouts) for n in program.nodes), specs=specs
    )


def _with_resolved_send(node: Node, layouts: Layouts) -> Node:
    """Return the node, with `StageSend` replaced by the `ReshardMark` of its completed layout."""
    if not isinstance(node.op, StageSend):
        return node
    (out,) = node.outs
    return replace(node, op=ReshardMark(node.op.mesh, layouts.specs[out.name].layout))


_Needs = list[tuple[Value, Spec]]
"""The tensors among the operands of an operator, each with the required spec."""


@dataclass(slots=True)
class _State:
    """The layouts known so far, and the layouts that the uses of other values want, each with a reason."""

    program: Program
    known: dict[Value, Spec] = field(default_factory=dict[Value, Spec])
    reasons: dict[Value, str] = field(default_factory=dict[Value, str])
    wants: dict[Value, dict[Node, tuple[Spec, str]]] = field(default_factory=dict[Value, dict[Node, tuple[Spec, str]]])
    meta_tensors: dict[Value, Any] = field(default_factory=dict[Value, Any])
    decided: dict[Any, tuple[OperatorCall, Decision] | None] = field(default_factory=dict[Any, Any])
    """Results of `_call_and_decision` by everything that determines them. Equal layers share one."""

    @classmethod
    def of(cls, program: Program, marks: Mapping[str, Spec], reasons: Mapping[str, str]) -> _State:
        """Return the state after propagation of these marks."""
        state = cls(program)
        for node in program.nodes:
            if isinstance(node.op, ReshardMark):
                (out,) = node.outs
                state.know(out, Spec(node.op.mesh, node.op.layout, out.shape, tensor_dtype(out)), "mark")
        for i in program.inputs:
            if i.value.name in marks:
                state.know(i.value, marks[i.value.name], reasons[i.value.name])
        while state.sweep() or state.settle():
            pass
        state.default()
        return state

    def wanted_cut(self, marked: Mapping[str, str]) -> dict[str, Spec]:
        """Return specs of unmarked parameters that can be sharded to make a result in the layout that all uses want.

        Only specs that cause no traffic are returned.
        """
        unmarked = {i.value for i in self.program.inputs if i.role == "parameter" and i.value.name not in marked}
        found: dict[str, Spec] = {}
        for node in self.program.nodes:
            mine = [v for v in node.ins if v in unmarked]
            layout = self._wanted_by_uses(node) if mine else None
            if layout is not None:
                found |= self._cut_for(node, frozenset(mine), layout)
        return found

    def _wanted_by_uses(self, node: Node) -> Layout | None:
        """Return the layout that all uses of the node's result want; None if they disagree or it has that layout."""
        out, *more = node.outs
        users, spec = self.program.users.get(out), self.known.get(out)
        if more or not users or spec is None or spec.layout.partial:
            return None
        wish, *others = {self._wanted_layout(user, out) for user in users}
        return None if others or wish == Layout(spec.layout.dims) else wish

    def _wanted_layout(self, user: Node, v: Value) -> Layout | None:
        found = self._described(user, frozenset([v]), None)
        if found is None:
            return None
        wanted = {need.layout.dims for x, need in found[0] if x is v}
        return Layout(wanted.pop()) if len(wanted) == 1 else None

    def _cut_for(self, node: Node, mine: frozenset[Value], wish: Layout) -> dict[str, Spec]:
        found = self._described(node, mine, wish)
        if found is None:
            return {}
        needs, decision = found
        moved = any(need.layout.dims != self.known[v].layout.dims for v, need in needs if v not in mine)
        result = decision.outs[0]
        if moved or result.dims != wish.dims or result.partial:
            return {}
        cut = {v: self.known[v].with_layout(Layout(need.layout.dims)) for v, need in needs if v in mine}
        return {v.name: spec for v, spec in cut.items() if spec is not self.known[v]}

    def know(self, v: Value, spec: Spec, why: str) -> None:
        self.known[v], self.reasons[v] = spec, why

    def sweep(self) -> bool:
        """Run one forward and one backward pass over all nodes; True if a result became known."""
        before = len(self.known)
        for node in self.program.nodes:
            self._forward(node)
        for node in reversed(self.program.nodes):
            self._backward(node)
        return len(self.known) != before

    def settle(self) -> bool:
        """Assign the cheapest requested layout to unknown tensors, inputs first; True if there were any."""
        unknown = [v for v in self.wants if v not in self.known]
        inputs = [v for v in unknown if v not in self.program.producers]
        for v in inputs or unknown:
            wants = self._of_first_mesh(self.wants.pop(v))
            spec, why = min(_candidates(wants), key=lambda c: sum(_cost(c[0], need) for need, _ in wants))
            self.know(v, spec, why)
        return bool(unknown)

    def _of_first_mesh(self, wants: Mapping[Node, tuple[Spec, str]]) -> list[tuple[Spec, str]]:
        """Return the requested layouts of a value; of several meshes, only those on the first reader's mesh."""
        if len({spec.mesh for spec, _ in wants.values()}) == 1:
            return list(wants.values())
        first = next(node for node in self.program.nodes if node in wants)
        return [want for want in wants.values() if want[0].mesh is wants[first][0].mesh]

    def default(self) -> None:
        """Replicate the values that no mark reached, if the program has exactly one mesh."""
        meshes = {spec.mesh for spec in self.known.values()}
        if len(meshes) != 1:
            return
        (mesh,) = meshes
        for v in self.program.all_values():
            if v.is_tensor and v not in self.known:
                self.know(v, _replicated_spec(v, mesh), "default")

    def _forward(self, node: Node) -> None:
        if all(v in self.known for v in node.outs) or self.known.keys().isdisjoint(node.ins):
            return
        if isinstance(node.op, StageSend):
            self._know_sent(node)
            return
        decision = self._decided(node, None)
        mesh = next(self.known[v].mesh for v in node.ins if v in self.known)
        layouts = () if decision is None else decision.outs
        for at, v in enumerate(node.outs):
            if v.is_tensor:
                layout = layouts[at % len(layouts)] if layouts else None
                self.know(v, _spec_if_fitting(v, mesh, layout), "forward")

    def _know_sent(self, node: Node) -> None:
        """Set the layout of a sent tensor: that of its source, with pending sums reduced."""
        (x,), (out,) = node.ins, node.outs
        assert isinstance(node.op, StageSend)
        layout = Layout(self.known[x].layout.dims)
        self.know(out, Spec(node.op.mesh, layout, out.shape, tensor_dtype(out)), "forward")

    def _backward(self, node: Node) -> None:
        unknown = [v for v in node.ins if v.is_tensor and v not in self.known]
        if not unknown or not any(v in self.known for v in node.outs):
            return
        if isinstance(node.op, (ReshardMark, StageSend)):
            (out,) = node.outs
            self._want(unknown[0], node, self.known[out], "backward")
            return
        first = next(v for v in node.outs if v in self.known)
        self._decided(node, self.known[first].layout)

    def _want(self, v: Value, node: Node, spec: Spec, why: str) -> None:
        wants = self.wants.setdefault(v, {})
        if node not in wants or wants[node][0] is not spec:
            wants[node] = (spec, why)

    def _decided(self, node: Node, wish: Layout | None) -> Decision | None:
        """Return the decision for the operator, and note the layouts that it requests of unknown operands.

        Returns None without a rule.
        """
        unknown = frozenset(v for v in node.ins if v not in self.known)
        found = self._described(node, unknown, wish)
        if found is None:
            self._want_whole(node, unknown)
            return None
        needs, decision = found
        for v, need in needs:
            if v in unknown:
                spec = Spec(need.mesh, Layout(need.layout.dims), v.shape, tensor_dtype(v))
                self._want(v, node, spec, "forward" if wish is None else "backward")
        return decision

    def _want_whole(self, node: Node, unknown: Iterable[Value]) -> None:
        """Request replicated operands for an operator without a rule, on the mesh of its known operands or results."""
        mesh = self._mesh_near(node)
        if mesh is None or isinstance(node.op, (ReshardMark, StageSend)):
            return
        for v in unknown:
            if v.is_tensor:
                self._want(v, node, _replicated_spec(v, mesh), "whole")

    def _mesh_near(self, node: Node) -> ProcessMesh | None:
        """Return the mesh of the first operand or result with a known layout."""
        return next((self.known[v].mesh for v in (*node.ins, *node.outs) if v in self.known), None)

    def _described(self, node: Node, free: frozenset[Value], wish: Layout | None) -> tuple[_Needs, Decision] | None:
        """Return the required specs and the decision of an operator; operands in `free` may take any layout.

        Returns None without a rule.
        """
        if not isinstance(node.op, Operator):
            return None
        key = self._key(node, free, wish)
        if key is None or key not in self.decided:
            self.decided[key] = self._call_and_decision(node.op, node, free, wish)
        found = self.decided[key]
        if found is None:
            return None
        call, decision = found
        pairs = zip(call.operands(node.args, node.kwargs), decision.ins, strict=True)
        return [(v, need) for v, need in pairs if v is not None and need is not None], decision

    def _key(self, node: Node, free: frozenset[Value], wish: Layout | None) -> tuple[Hashable, ...] | None:
        """Return everything that determines the layouts of an operator; None for symbolic sizes."""
        ins = dict.fromkeys(node.ins)
        if not all(type(n) is int for v in ins for n in v.shape):
            return None
        names = {v: f"%{at}" for at, v in enumerate(ins)}
        facts = tuple((v.shape, v.dtype, v in free, self.known.get(v)) for v in ins)
        call = repr(node.mapped_arguments(names.__getitem__))
        return node.op, call, facts, id(self._mesh_near(node)), wish

    def _call_and_decision(
        self, op: Operator, node: Node, free: frozenset[Value], wish: Layout | None
    ) -> tuple[OperatorCall, Decision] | None:
        """Return the call with its rule, and the decision; None without a rule, or for operands on several meshes."""
        call = self._call_of(op, node)
        if call is None:
            return None
        mesh = self._mesh_near(node)
        assert mesh is not None
        operands = call.operands(node.args, node.kwargs)
        ins = [self._operand_spec(v, mesh, free) for v in operands]
        if {spec.mesh for spec in ins if spec is not None} != {mesh}:
            return None
        free_places = frozenset(at for at, v in enumerate(operands) if v in free)
        decision = _decision_for(call, ins, free_places, wish)
        return None if decision is None else (call, decision)

    def _call_of(self, op: Operator, node: Node) -> OperatorCall | None:
        """Return the call with its rule, found with meta tensors as operands; None without a rule."""
        args, kwargs = node.mapped_arguments(self._stand_in)
        try:
            return describe_for_propagation(op, args, kwargs)
        except RuleError:
            return None

    def _operand_spec(self, v: Value | None, mesh: ProcessMesh, free: frozenset[Value]) -> Spec | None:
        """Return the known spec of an operand, or a replicated one if it is unknown or in `free`."""
        if v is None:
            return None
        return self.known[v] if v in self.known and v not in free else _replicated_spec(v, mesh)

    def _stand_in(self, v: Value) -> TorchValue:
        if not isinstance(v.dtype, torch.dtype):
            return v.dtype(2)
        if v not in self.meta_tensors:
            self.meta_tensors[v] = torch.empty([hint(n) for n in v.shape], dtype=v.dtype, device="meta")
        return self.meta_tensors[v]


def _replicated_spec(v: Value, mesh: ProcessMesh) -> Spec:
    return Spec(mesh, replicated(len(v.shape)), v.shape, tensor_dtype(v))


def _spec_if_fitting(v: Value, mesh: ProcessMesh, layout: Layout | None) -> Spec:
    """Return the spec with this layout; replicated if the layout has another number of dims."""
    if layout is None or layout.ndim != len(v.shape):
        return _replicated_spec(v, mesh)
    return Spec(mesh, layout, v.shape, tensor_dtype(v))


def _decision_for(
    call: OperatorCall, ins: Sequence[Spec | None], free_places: frozenset[int], wish: Layout | None
) -> Decision | None:
    """Return the decision for a call on operands with these specs."""
    layouts = [None if spec is None else spec.layout for spec in ins]
    call = replace(call, bound=split_sharded_products(call.bound, layouts))
    return decide(call, [None if spec is None else spec.concrete for spec in ins], free_places, wish)


def _candidates(wants: Sequence[tuple[Spec, str]]) -> list[tuple[Spec, str]]:
    """Return the requested specs, each once, and the replicated one."""
    found, first = dict(wants), wants[0][0]
    found.setdefault(first.with_layout(replicated(first.ndim)), "default")
    return list(found.items())


def _cost(have: Spec, need: Spec) -> float:
    """Return the bytes that the busiest rank moves for a use, including the conversion of the gradient."""
    if have is need or have.mesh is not need.mesh:
        return 0.0
    return float(plan(have, need).busiest + plan(*transposed(have, need)).busiest)
