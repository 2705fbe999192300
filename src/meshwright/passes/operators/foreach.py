"""Merging of the optimizer's operators on single parameters into `torch._foreach_*` operators on lists.

Nodes of the update with equal formulas, except for their inputs, work on different parameters and do not depend on each
other. Collectives keep their order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush
from typing import Any, ClassVar

import torch

from meshwright.graph import (
    Change,
    Node,
    Op,
    Operator,
    Pass,
    Program,
    Value,
    live_memory,
    name_of,
    refuse_writing,
    register_pass,
    values_in,
)
from meshwright.layout import TorchValue

from .._fixed_order import has_fixed_order

aten = torch.ops.aten
Columns = tuple[list[Any], ...]
NamedColumns = Mapping[str, list[Any]]
Call = tuple[Operator, tuple[Any, ...], Mapping[str, Any]]
"""An operator on lists, its arguments and its keyword arguments."""
ListCall = Callable[[Columns, NamedColumns], Call | None]
"""Makes the call on lists from columns of arguments; returns None if there is none."""


def _unary(op: Operator) -> ListCall:
    """Return a function that makes the call on lists of `op(x)`."""
    return lambda columns, named: (op, columns, {}) if len(columns) == 1 and not named else None


def _binary(packet: TorchValue) -> ListCall:
    """Return a function that makes the call on lists of `op(x, y)`; `y` is a tensor or a number for each `x`."""

    def call(columns: Columns, named: NamedColumns) -> Call | None:
        if len(columns) != 2:
            return None
        xs, ys = columns
        if not all(map(_is_tensor, ys)):
            return _with_numbers(packet, columns, named)
        if any(x.sizes != y.sizes for x, y in zip(xs, ys, strict=True)) or not all(map(_same, named.values())):
            return None
        return packet.List, columns, {name: column[0] for name, column in named.items()}

    return call


def _with_numbers(packet: TorchValue, columns: Columns, named: NamedColumns) -> Call | None:
    """Return a call on lists of tensors and a last or named number, which is one for all or one for each; else None."""
    *tensors, last = (*columns, *named.values())
    if len(named) > 1 or any(map(_is_tensor, last)) or not all(_is_tensor(t) for column in tensors for t in column):
        return None
    if any(len({t.shape for t in row}) > 1 for row in zip(*tensors, strict=True)):
        return None
    if _same(last):
        return packet.Scalar, (*tensors, last[0]), {}
    return packet.ScalarList, (*tensors, last), {}


def _ternary(packet: TorchValue) -> ListCall:
    """Return a function that makes the call on lists of `op(x, a, b, value=1)`."""

    def call(columns: Columns, named: NamedColumns) -> Call | None:
        if len(columns) != 3:
            return None
        return _with_numbers(packet, columns, named or {"value": [1] * len(columns[0])})

    return call


def _lerp(columns: Columns, named: NamedColumns) -> Call | None:
    return _with_numbers(aten._foreach_lerp, columns, named) if len(columns) == 3 and not named else None


FOREACH: Mapping[Op, ListCall] = {
    **dict.fromkeys([aten.add.Tensor, aten.add.Scalar], _binary(aten._foreach_add)),
    **dict.fromkeys([aten.sub.Tensor, aten.sub.Scalar], _binary(aten._foreach_sub)),
    **dict.fromkeys([aten.mul.Tensor, aten.mul.Scalar], _binary(aten._foreach_mul)),
    **dict.fromkeys([aten.div.Tensor, aten.div.Scalar], _binary(aten._foreach_div)),
    aten.pow.Tensor_Scalar: _binary(aten._foreach_pow),
    aten.maximum.default: _binary(aten._foreach_maximum),
    aten.lerp.Scalar: _lerp,
    aten.addcmul.default: _ternary(aten._foreach_addcmul),
    aten.addcdiv.default: _ternary(aten._foreach_addcdiv),
    aten.sqrt.default: _unary(aten._foreach_sqrt.default),
    aten.rsqrt.default: _unary(aten._foreach_rsqrt.default),
    aten.neg.default: _unary(aten._foreach_neg.default),
    aten.abs.default: _unary(aten._foreach_abs.default),
    aten.sign.default: _unary(aten._foreach_sign.default),
    aten.reciprocal.default: _unary(aten._foreach_reciprocal.default),
}
"""Operator → function that makes its call on lists."""


@register_pass
@dataclass(frozen=True)
class Foreach(Pass):
    """Merge groups of at least `least` operators of the update, which then runs after all other nodes of the step."""

    name: ClassVar[str] = "foreach"
    keeps_sums: ClassVar[bool] = True
    least: int = 2

    def run(self, program: Program) -> Program:
        refuse_writing(program, repr(self))
        region = _region(program)
        if not _keeps_order(program, region):
            return program
        units = list(_units(program, region, self.least, {}))
        try:
            order = list(_sorted(units))
        except CycleError:  # groups depend on each other through nodes of fixed order
            units = list(_units(program, region, self.least, _order_dependences(program, region)))
            order = list(_sorted(units))
        groups = [u for u in units if len(u.nodes) > 1]
        if not groups:
            return program
        nodes = (*(n for n in program.nodes if n not in region), *(u.node for u in order))
        out = replace(program, nodes=nodes)
        changes = [
            Change(self.name, f"{len(u.nodes)} × {name_of(u.nodes[0].op)} become {name_of(u.node.op)}", "", {})
            for u in groups
        ]
        removed = len(program.nodes) - len(nodes)
        freed = live_memory(program).peak_in("update") - live_memory(out).peak_in("update")
        return out.with_changes(*changes, Change(self.name, "in all", "", {"operators": removed, "bytes": freed}))


def _region(program: Program) -> set[Node]:
    """Return the nodes of the update, and all nodes that depend on them."""
    found: set[Node] = set()
    made: set[Value] = set()
    for node in program.nodes:
        if node.origin.phase == "update" or any(v in made for v in node.ins):
            found.add(node)
            made.update(node.outs)
    return found


def _keeps_order(program: Program, region: set[Node]) -> bool:
    """True if the region can run after the rest without changing the order of nodes of fixed order."""
    ordered = [node in region for node in program.nodes if has_fixed_order(node)]
    return ordered == sorted(ordered)


def _order_dependences(program: Program, region: set[Node]) -> dict[Node, Any]:
    """Return, for each node of the region, a pair: it depends on an ordered node; an ordered node depends on it.

    Groups of nodes with equal pairs cannot depend on each other. A node with both dependencies gets a key of its own.
    """
    flow = [(n, n.ins, n.outs) for n in program.nodes if n in region]
    behind, before = _reached(flow), _reached([(n, outs, ins) for n, ins, outs in reversed(flow)])
    return {n: n if n in behind and n in before else (n in behind, n in before) for n in region}


def _reached(flow: Iterable[tuple[Node, Iterable[Value], Iterable[Value]]]) -> set[Node]:
    """Return the nodes that are reachable from an ordered node; `flow` has each node's incoming and outgoing values."""
    found: set[Node] = set()
    touched: set[Value] = set()
    for node, to, on in flow:
        if any(v in touched for v in to):
            found.add(node)
        if node in found or has_fixed_order(node):
            touched.update(on)
    return found


@dataclass(frozen=True, eq=False)
class _MergedNodes:
    """Nodes that become one: `node` replaces them, `at` is the position of the first one."""

    nodes: Sequence[Node]
    node: Node
    at: int


def _units(program: Program, region: set[Node], least: int, sides: Mapping[Node, Any]) -> Iterator[_MergedNodes]:
    """Yield the units of the region; nodes with equal formula and equal sides are merged into one unit."""
    place = {node: at for at, node in enumerate(program.nodes)}
    formulas = _Formulas({i.value: (i.role, str(i.name.rpartition(".")[2])) for i in program.inputs})
    alike: dict[Any, list[Node]] = {}
    for node in program.nodes:
        if node in region:
            key = formulas.of(node), sides.get(node)
            may_merge = node.op in FOREACH and not has_fixed_order(node)
            alike.setdefault(key if may_merge else node, []).append(node)
    for nodes in alike.values():
        merged = _merge_nodes(nodes) if len(nodes) >= max(least, 2) else None
        if merged is None:
            yield from (_MergedNodes([node], node, place[node]) for node in nodes)
        else:
            yield _MergedNodes(nodes, merged, place[nodes[0]])


def _merge_nodes(nodes: Sequence[Node]) -> Node | None:
    """Return one node on lists for all nodes, or None if there is no such operator."""
    columns: Columns = tuple(map(list, zip(*(n.args for n in nodes), strict=True)))
    named = {key: [n.kwargs[key] for n in nodes] for key in nodes[0].kwargs}
    call = FOREACH[nodes[0].op](columns, named)
    if call is None:
        return None
    op, args, kwargs = call
    return Node(op, args, kwargs, [n.out for n in nodes], replace(nodes[0].origin, layer=""))


@dataclass
class _Formulas:
    """Numbers of the formulas that compute values. Inputs are identified by role and last part of the name."""

    roles: Mapping[Value, Any]
    known: dict[Value, Any] = field(default_factory=dict[Value, Any])
    numbers: dict[Any, int] = field(default_factory=dict[Any, int])

    def of(self, node: Node) -> int:
        key = (node.op, self._formula(node.args), tuple((k, self._formula(v)) for k, v in node.kwargs.items()))
        number = self.numbers.setdefault(key, len(self.numbers))
        for at, v in enumerate(node.outs):
            self.known[v] = (number, at, str(v.dtype), v.device)
        return number

    def _formula(self, tree: TorchValue) -> Hashable:
        """Return a key for an argument, which is equal for values of equal formulas."""
        if isinstance(tree, Value):
            return self.known.get(tree) or self._leaf(tree)
        if isinstance(tree, (tuple, list)):
            return tuple(map(self._formula, tree))
        return (type(tree).__name__, repr(tree))

    def _leaf(self, v: Value) -> Hashable:
        if not v.is_tensor:
            return v
        return (self.roles.get(v, "made"), str(v.dtype), v.device)


def _sorted(units: Sequence[_MergedNodes]) -> Iterator[_MergedNodes]:
    """Yield the units in topological order, and in program order where there is a choice.

    Raises CycleError if units depend on each other.
    """
    sorter = _dependences(units)
    sorter.prepare()
    unit_at = {unit.at: unit for unit in units}
    ready: list[int] = []
    while sorter.is_active():
        for unit in sorter.get_ready():
            heappush(ready, unit.at)
        first = unit_at[heappop(ready)]
        yield first
        sorter.done(first)


def _dependences(units: Sequence[_MergedNodes]) -> TopologicalSorter[_MergedNodes]:
    """Return the graph of the units: each depends on the producers of its operands; others must keep their order."""
    makers = {v: unit for unit in units for v in unit.node.outs}
    found = TopologicalSorter[_MergedNodes]()
    for unit in units:
        found.add(unit, *(makers[v] for v in unit.node.ins if v in makers))
    ordered = sorted((unit for unit in units if has_fixed_order(unit.node)), key=lambda unit: unit.at)
    for before, after in itertools.pairwise(ordered):
        found.add(after, before)
    return found


def _is_tensor(v: object) -> bool:
    return isinstance(v, Value) and v.is_tensor


def _same(items: Sequence[Any]) -> bool:
    """True if all items are one value, or equal constants of one type."""
    first = items[0]
    if any(isinstance(v, Value) for v in (first, *values_in(tuple(items)))):
        return all(v is first for v in items)
    return all(type(v) is type(first) and v == first for v in items)
