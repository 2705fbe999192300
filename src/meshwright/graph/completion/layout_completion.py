"""Completion of layouts: marks are propagated forward and backward through the program until nothing changes.

Marks are inputs with a spec and `reshard` calls. The forward sweep decides each operator's layout as eager mode does;
unmarked operands take the cheapest layout. The backward sweep derives the wanted layout of unmarked operands from the
known layout of a result. If uses want different layouts of an unmarked tensor, the layout that moves fewest bytes is
taken, gradients included. The order of nodes decides only ties. Values that no mark reaches are replicated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from meshwright.layout import Layout, ProcessMesh, Spec, hint, replicated
from meshwright.reshard import plan, transposed
from meshwright.spmd import RuleError, describe_for_propagation, split_sharded_products
from meshwright.tensor import Decision, ReshardMark, decide

from ..program.layouts import Layouts
from ..program.node import Node, Value, map_values, tensor_dtype, values_in
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
    specs = {v: layouts.specs[v.name] for v in _all_values(program) if v.name in layouts.specs}
    return replace(program, inputs=inputs, nodes=tuple(_marked(n, layouts) for n in program.nodes), specs=specs)


def _marked(node: Node, layouts: Layouts) -> Node:
    """Return the node, with `StageSend` replaced by the `ReshardMark` of its completed layout."""
    if not isinstance(node.op, StageSend):
        return node
    (out,) = node.outs
    return replace(node, op=ReshardMark(node.op.mesh, layouts.specs[out.name].layout))


@dataclass(slots=True)
class _State:
    program: Program
    known: dict[Value, Spec] = field(default_factory=dict[Value, Spec])
    reasons: dict[Value, str] = field(default_factory=dict[Value, str])
    wants: dict[Value, dict[Node, tuple[Spec, str]]] = field(default_factory=dict[Value, dict[Node, tuple[Spec, str]]])
    stand: dict[Value, Any] = field(default_factory=dict[Value, Any])
    decided: dict[Any, Any] = field(default_factory=dict[Any, Any])
    """Results of `_described` by all of its inputs; operands are places in `node.ins`. Equal layers share one."""

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
        users = self.program.users.get(out, ())
        if more or not users or out not in self.known or self.known[out].layout.partial:
            return None
        wishes = {self._wish(user, out) for user in users}
        (wish, *others) = wishes
        return None if others or wish is None or wish == Layout(self.known[out].layout.dims) else wish

    def _wish(self, user: Node, v: Value) -> Layout | None:
        found = self._described(user, frozenset([v]), None)
        if found is None:
            return None
        operands, decision = found
        needs = {need.layout.dims for x, need in zip(operands, decision.ins, strict=True) if x is v and need}
        return Layout(needs.pop()) if len(needs) == 1 else None

    def _cut_for(self, node: Node, mine: frozenset[Value], wish: Layout) -> dict[str, Spec]:
        found = self._described(node, mine, wish)
        if found is None:
            return {}
        operands, decision = found
        pairs = [(v, need) for v, need in zip(operands, decision.ins, strict=True) if v is not None and need]
        moved = any(need.layout.dims != self.known[v].layout.dims for v, need in pairs if v not in mine)
        if moved or decision.outs[0].dims != wish.dims or decision.outs[0].partial:
            return {}
        cut = {v: self.known[v].with_layout(Layout(need.layout.dims)) for v, need in pairs if v in mine}
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
        for v in _all_values(self.program):
            if v.is_tensor and v not in self.known:
                self.know(v, Spec(mesh, replicated(len(v.shape)), v.shape, tensor_dtype(v)), "default")

    def _forward(self, node: Node) -> None:
        if all(v in self.known for v in node.outs) or not any(v in self.known for v in node.ins):
            return
        if isinstance(node.op, StageSend):
            self._arrive(node)
            return
        found = self._decided(node, None)
        mesh = next(self.known[v].mesh for v in node.ins if v in self.known)
        layouts = found.outs if found is not None else ()
        layouts = layouts if len(layouts) == len(node.outs) else layouts * len(node.outs)
        for at, v in enumerate(node.outs):
            if not v.is_tensor:
                continue
            fits = at < len(layouts) and layouts[at].ndim == len(v.shape)
            layout = layouts[at] if fits else replicated(len(v.shape))
            self.know(v, Spec(mesh, layout, v.shape, tensor_dtype(v)), "forward")

    def _arrive(self, node: Node) -> None:
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
        operands, decision = found
        for v, need in zip(operands, decision.ins, strict=True):
            if v is not None and v in unknown and need is not None:
                spec = self._spec(v, need.mesh).with_layout(Layout(need.layout.dims))
                self._want(v, node, spec, "forward" if wish is None else "backward")
        return decision

    def _want_whole(self, node: Node, unknown: Iterable[Value]) -> None:
        """Request replicated operands for an operator without a rule, on the mesh of its known operands or results."""
        near = next((self.known[v] for v in (*node.ins, *node.outs) if v in self.known), None)
        if near is None or isinstance(node.op, (ReshardMark, StageSend)):
            return
        for v in unknown:
            if v.is_tensor:
                self._want(v, node, self._spec(v, near.mesh), "whole")

    def _described(
        self, node: Node, free: frozenset[Value], wish: Layout | None
    ) -> tuple[list[Value | None], Decision] | None:
        """Return the operands and the decision of an operator; operands in `free` may take any layout.

        Returns None without a rule.
        """
        if not isinstance(node.op, Operator):
            return None
        ins = list(dict.fromkeys(node.ins))
        key = self._key(node, ins, free, wish)
        if key is None or key not in self.decided:
            found = self._described_anew(node, free, wish)
            places = None if found is None else ([None if v is None else ins.index(v) for v in found[0]], found[1])
            if key is None:
                return found
            self.decided[key] = places
        known = self.decided[key]
        return None if known is None else ([None if at is None else ins[at] for at in known[0]], known[1])

    def _key(self, node: Node, ins: Sequence[Value], free: frozenset[Value], wish: Layout | None) -> Any:
        """Return everything that determines the layouts of an operator; None for symbolic sizes."""
        if not all(type(n) is int for v in ins for n in v.shape):
            return None
        names = {v: f"%{at}" for at, v in enumerate(ins)}
        specs = [self.known.get(v) for v in (*ins, *node.outs)]
        near = next((spec.mesh for spec in specs if spec is not None), None)
        looks = tuple((v.shape, v.dtype, v in free) for v in ins)
        call = repr(map_values(names.__getitem__, (node.args, dict(node.kwargs))))
        return node.op, call, looks, tuple(specs[: len(ins)]), id(near), wish

    def _described_anew(
        self, node: Node, free: frozenset[Value], wish: Layout | None
    ) -> tuple[list[Value | None], Decision] | None:
        """Return what `_described` returns, and remember nothing."""
        assert isinstance(node.op, Operator)
        args, kwargs = map_values(self._stand_in, (node.args, dict(node.kwargs)))
        try:
            call = describe_for_propagation(node.op, args, kwargs)
        except RuleError:
            return None
        if call is None:
            return None
        operands: list[Value | None] = call.operands(node.args, node.kwargs)
        near = next(self.known[v] for v in (*node.ins, *node.outs) if v in self.known)
        ins = [
            None if v is None else self._free(v, near.mesh) if v in free else self._spec(v, near.mesh) for v in operands
        ]
        if all(s is None for s in ins) or any(s is not None and s.mesh is not near.mesh for s in ins):
            return None
        call = replace(
            call, bound=split_sharded_products(call.bound, [s.layout if s is not None else None for s in ins])
        )
        open_places = frozenset(at for at, v in enumerate(operands) if v in free)
        found = decide(call, [s.concrete if s is not None else None for s in ins], open_places, wish)
        return None if found is None else (operands, found)

    def _free(self, v: Value, mesh: ProcessMesh) -> Spec:
        return Spec(mesh, replicated(len(v.shape)), v.shape, tensor_dtype(v))

    def _stand_in(self, v: Value) -> Any:
        if not isinstance(v.dtype, torch.dtype):
            return v.dtype(2)
        if v not in self.stand:
            self.stand[v] = torch.empty([hint(n) for n in v.shape], dtype=v.dtype, device="meta")
        return self.stand[v]

    def _spec(self, v: Value, mesh: ProcessMesh) -> Spec:
        found = self.known.get(v)
        return found if found is not None else self._free(v, mesh)


def _candidates(wants: Sequence[tuple[Spec, str]]) -> list[tuple[Spec, str]]:
    found = {spec: (spec, why) for spec, why in wants}
    whole = [(s.with_layout(replicated(s.ndim)), "default") for s in list(found)[:1]]
    return [*found.values(), *[w for w in whole if w[0] not in found]]


def _cost(have: Spec, need: Spec) -> float:
    """Return the bytes that the busiest rank moves for a use, including the conversion of the gradient."""
    if have is need or have.mesh is not need.mesh:
        return 0.0
    return float(plan(have, need).busiest + plan(*transposed(have, need)).busiest)


def _all_values(program: Program) -> Iterable[Value]:
    for given in program.inputs:
        yield given.value
    for node in program.nodes:
        yield from values_in(node.out)
