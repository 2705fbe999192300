"""Merging of the optimizer's operators on single parameters into `torch._foreach_*` operators on lists.

Nodes of the update with equal formulas, except for their inputs, work on different parameters and do not depend on each
other. Collectives keep their order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from typing import Any, ClassVar

import torch

from meshwright.graph import (
    Change,
    Conversion,
    Node,
    Pass,
    Program,
    Value,
    is_assertion,
    is_random_operator,
    live_memory,
    name_of,
    refuse_writing,
    register_pass,
    values_in,
)

aten = torch.ops.aten
Columns = tuple[list[Any], ...]
Call = tuple[Any, tuple[Any, ...], Mapping[str, Any]]
"""An operator on lists, its arguments and its keyword arguments."""


def _unary(packet: Any) -> Callable[[Columns, Mapping[str, list[Any]]], Call | None]:
    """Return a function that makes the call on lists of `op(x)`."""
    return lambda columns, named: (packet.default, columns, {}) if len(columns) == 1 and not named else None


def _binary(packet: Any) -> Callable[[Columns, Mapping[str, list[Any]]], Call | None]:
    """Return a function that makes the call on lists of `op(x, y)`; `y` is a tensor or a number for each `x`."""

    def call(columns: Columns, named: Mapping[str, list[Any]]) -> Call | None:
        if len(columns) != 2:
            return None
        xs, ys = columns
        if all(_is_tensor(y) for y in ys):
            alike = all(x.sizes == y.sizes for x, y in zip(xs, ys, strict=True)) and all(map(_same, named.values()))
            return (packet.List, columns, {k: v[0] for k, v in named.items()}) if alike else None
        return _with_numbers(packet, columns, named)

    return call


def _with_numbers(packet: Any, columns: Columns, named: Mapping[str, list[Any]]) -> Call | None:
    """Return a call on lists of tensors and a last or named number, which is one for all or one for each; else None."""
    *tensors, last = (*columns, *named.values())
    if len(named) > 1 or any(_is_tensor(n) for n in last) or not all(_is_tensor(t) for ts in tensors for t in ts):
        return None
    if any(len({t.shape for t in row}) > 1 for row in zip(*tensors, strict=True)):
        return None
    return (packet.Scalar, (*tensors, last[0]), {}) if _same(last) else (packet.ScalarList, (*tensors, last), {})


def _ternary(packet: Any) -> Callable[[Columns, Mapping[str, list[Any]]], Call | None]:
    """Return a function that makes the call on lists of `op(x, a, b, value=1)`."""

    def call(columns: Columns, named: Mapping[str, list[Any]]) -> Call | None:
        return _with_numbers(packet, columns, named or {"value": [1] * len(columns[0])}) if len(columns) == 3 else None

    return call


def _lerp(columns: Columns, named: Mapping[str, list[Any]]) -> Call | None:
    return _with_numbers(aten._foreach_lerp, columns, named) if len(columns) == 3 and not named else None


FOREACH: Mapping[Any, Callable[[Columns, Mapping[str, list[Any]]], Call | None]] = {
    **dict.fromkeys([aten.add.Tensor, aten.add.Scalar], _binary(aten._foreach_add)),
    **dict.fromkeys([aten.sub.Tensor, aten.sub.Scalar], _binary(aten._foreach_sub)),
    **dict.fromkeys([aten.mul.Tensor, aten.mul.Scalar], _binary(aten._foreach_mul)),
    **dict.fromkeys([aten.div.Tensor, aten.div.Scalar], _binary(aten._foreach_div)),
    aten.pow.Tensor_Scalar: _binary(aten._foreach_pow),
    aten.maximum.default: _binary(aten._foreach_maximum),
    aten.lerp.Scalar: _lerp,
    aten.addcmul.default: _ternary(aten._foreach_addcmul),
    aten.addcdiv.default: _ternary(aten._foreach_addcdiv),
    aten.sqrt.default: _unary(aten._foreach_sqrt),
    aten.rsqrt.default: _unary(aten._foreach_rsqrt),
    aten.neg.default: _unary(aten._foreach_neg),
    aten.abs.default: _unary(aten._foreach_abs),
    aten.sign.default: _unary(aten._foreach_sign),
    aten.reciprocal.default: _unary(aten._foreach_reciprocal),
}
"""Operator → function that makes its call on lists from columns of arguments, or returns None if there is none."""


@register_pass
@dataclass(frozen=True)
class Foreach(Pass):
    """Merge groups of at least `least` operators of the update, which then runs after all other nodes of the step."""

    name: ClassVar[str] = "foreach"
    least: int = 2

    def run(self, program: Program) -> Program:
        refuse_writing(program, repr(self))
        region = _region(program)
        if not _keeps_order(program, region):
            return program
        units = list(_units(program, region, self.least, {}))
        order = list(_sorted(units))
        if len(order) < len(units):  # groups depend on each other through ordered nodes
            units = list(_units(program, region, self.least, _order_dependences(program, region)))
            order = list(_sorted(units))
        groups = [u for u in units if len(u.nodes) > 1]
        if not groups:
            return program
        nodes = (*(n for n in program.nodes if n not in region), *(u.node for u in order))
        out = replace(program, nodes=nodes)
        told = [
            Change(self.name, f"{len(u.nodes)} × {name_of(u.nodes[0].op)} become {name_of(u.node.op)}", "", {})
            for u in groups
        ]
        gone = len(program.nodes) - len(nodes)
        grown = live_memory(program).peak_in("update") - live_memory(out).peak_in("update")
        return out.with_changes(*told, Change(self.name, "in all", "", {"operators": gone, "bytes": grown}))


def _region(program: Program) -> set[Node]:
    """Return the nodes of the update, and all nodes that depend on them."""
    found: set[Node] = set()
    made: set[Value] = set()
    for node in program.nodes:
        if node.origin.phase == "update" or any(v in made for v in node.ins):
            found.add(node)
            made.update(node.outs)
    return found


def _is_ordered(node: Node) -> bool:
    """True for nodes that must keep their order: collectives, random operators and assertions."""
    sends = isinstance(node.op, Conversion) and node.op.communicates
    return sends or is_random_operator(node.op) or is_assertion(node.op)


def _keeps_order(program: Program, region: set[Node]) -> bool:
    """True if the region can run after the rest without changing the order of ordered nodes."""
    ordered = [node in region for node in program.nodes if _is_ordered(node)]
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
        if node in found or _is_ordered(node):
            touched.update(on)
    return found


@dataclass(eq=False)
class _MergedNodes:
    """Nodes that become one: `node` replaces them, `at` is the position of the first one."""

    nodes: list[Node]
    node: Node
    at: int
    needs: int = 0
    feeds: list[_MergedNodes] = field(default_factory=list["_MergedNodes"])


def _units(program: Program, region: set[Node], least: int, sides: Mapping[Node, Any]) -> Iterator[_MergedNodes]:
    """Yield the units of the region; nodes with equal formula and equal sides are merged into one unit."""
    place = {node: at for at, node in enumerate(program.nodes)}
    formulas = _Formulas({i.value: (i.role, str(i.name.rpartition(".")[2])) for i in program.inputs})
    alike: dict[Any, list[Node]] = {}
    for node in program.nodes:
        if node in region:
            key = formulas.of(node), sides.get(node)
            alike.setdefault(key if node.op in FOREACH and not _is_ordered(node) else node, []).append(node)
    for nodes in alike.values():
        made = _merge_nodes(nodes) if len(nodes) >= max(least, 2) else None
        yield from (
            [_MergedNodes(nodes, made, place[nodes[0]])] if made else [_MergedNodes([n], n, place[n]) for n in nodes]
        )


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
        def told(tree: Any) -> Any:
            if isinstance(tree, Value):
                return self.known.get(tree) or self._leaf(tree)
            if isinstance(tree, (tuple, list)):
                return tuple(told(v) for v in tree)
            return (type(tree).__name__, repr(tree))

        key = (node.op, told(node.args), tuple((k, told(v)) for k, v in node.kwargs.items()))
        number = self.numbers.setdefault(key, len(self.numbers))
        for at, v in enumerate(node.outs):
            self.known[v] = (number, at, str(v.dtype), v.device)
        return number

    def _leaf(self, v: Value) -> Any:
        if not v.is_tensor:
            return v
        return (self.roles.get(v, "made"), str(v.dtype), v.device)


def _sorted(units: Sequence[_MergedNodes]) -> Iterator[_MergedNodes]:
    """Yield the units in topological order, and in program order where there is a choice."""
    makers = {v: u for u in units for n in u.nodes for v in n.outs}
    ordered = sorted((u for u in units if _is_ordered(u.node)), key=lambda u: u.at)
    for unit in units:
        for maker in {makers[v] for n in unit.nodes for v in n.ins if v in makers}:
            maker.feeds.append(unit)
            unit.needs += 1
    for first, second in itertools.pairwise(ordered):
        first.feeds.append(second)
        second.needs += 1
    ready = [(u.at, id(u), u) for u in units if not u.needs]
    heapify(ready)
    while ready:
        *_, unit = heappop(ready)
        yield unit
        for follower in unit.feeds:
            follower.needs -= 1
            if not follower.needs:
                heappush(ready, (follower.at, id(follower), follower))


def _is_tensor(v: Any) -> bool:
    return isinstance(v, Value) and v.is_tensor


def _same(items: Sequence[Any]) -> bool:
    """True if all items are one value, or equal constants of one type."""
    first = items[0]
    if any(isinstance(v, Value) for v in (first, *values_in(tuple(items)))):
        return all(v is first for v in items)
    return all(type(v) is type(first) and v == first for v in items)
