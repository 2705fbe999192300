"""The optimizer's operators, one per parameter, become one per step of its formula: `torch._foreach_*` on lists.

Nodes of the update with the same formula behind them, up to the inputs they start from, work on different parameters;
none of them can need another one. What is collectively done goes on in the same order as before.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from typing import Any, ClassVar

import torch

from meshwright.graph import (
    Carry,
    Change,
    Node,
    Pass,
    Program,
    Value,
    asserts,
    draws,
    live_memory,
    name_of,
    refuse_writing,
    register_pass,
    values_in,
)

aten = torch.ops.aten
Columns = tuple[list[Any], ...]
Call = tuple[Any, tuple[Any, ...], Mapping[str, Any]]
"""An operator on lists, and its arguments."""


def _one(packet: Any) -> Callable[[Columns, Mapping[str, list[Any]]], Call | None]:
    """`op(x)`."""
    return lambda columns, named: (packet.default, columns, {}) if len(columns) == 1 and not named else None


def _two(packet: Any) -> Callable[[Columns, Mapping[str, list[Any]]], Call | None]:
    """`op(x, y)` with a tensor, or with a number, which may differ from one `x` to the next."""

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
    """Lists of tensors, and a number at the end (or by name), one for all or one for each."""
    *tensors, last = (*columns, *named.values())
    if len(named) > 1 or any(_is_tensor(n) for n in last) or not all(_is_tensor(t) for ts in tensors for t in ts):
        return None
    if any(len({t.shape for t in row}) > 1 for row in zip(*tensors, strict=True)):
        return None
    return (packet.Scalar, (*tensors, last[0]), {}) if _same(last) else (packet.ScalarList, (*tensors, last), {})


def _three(packet: Any) -> Callable[[Columns, Mapping[str, list[Any]]], Call | None]:
    """`op(x, a, b, value=1)`."""

    def call(columns: Columns, named: Mapping[str, list[Any]]) -> Call | None:
        return _with_numbers(packet, columns, named or {"value": [1] * len(columns[0])}) if len(columns) == 3 else None

    return call


def _lerp(columns: Columns, named: Mapping[str, list[Any]]) -> Call | None:
    return _with_numbers(aten._foreach_lerp, columns, named) if len(columns) == 3 and not named else None


FOREACH: Mapping[Any, Callable[[Columns, Mapping[str, list[Any]]], Call | None]] = {
    **dict.fromkeys([aten.add.Tensor, aten.add.Scalar], _two(aten._foreach_add)),
    **dict.fromkeys([aten.sub.Tensor, aten.sub.Scalar], _two(aten._foreach_sub)),
    **dict.fromkeys([aten.mul.Tensor, aten.mul.Scalar], _two(aten._foreach_mul)),
    **dict.fromkeys([aten.div.Tensor, aten.div.Scalar], _two(aten._foreach_div)),
    aten.pow.Tensor_Scalar: _two(aten._foreach_pow),
    aten.maximum.default: _two(aten._foreach_maximum),
    aten.lerp.Scalar: _lerp,
    aten.addcmul.default: _three(aten._foreach_addcmul),
    aten.addcdiv.default: _three(aten._foreach_addcdiv),
    aten.sqrt.default: _one(aten._foreach_sqrt),
    aten.rsqrt.default: _one(aten._foreach_rsqrt),
    aten.neg.default: _one(aten._foreach_neg),
    aten.abs.default: _one(aten._foreach_abs),
    aten.sign.default: _one(aten._foreach_sign),
    aten.reciprocal.default: _one(aten._foreach_reciprocal),
}
"""Operator → how a call of it on lists reads, from the columns of its arguments; None where there is no such call."""


@register_pass
@dataclass(frozen=True)
class Foreach(Pass):
    """Groups of at least `least` operators of the update become one; it runs behind everything else of the step."""

    name: ClassVar[str] = "foreach"
    least: int = 2

    def run(self, program: Program) -> Program:
        refuse_writing(program, repr(self))
        region = _region(program)
        if not _keeps_order(program, region):
            return program
        units = list(_units(program, region, self.least, {}))
        order = list(_sorted(units))
        if len(order) < len(units):  # groups need each other, by way of what keeps its order
            units = list(_units(program, region, self.least, _sides(program, region)))
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
    """The update, and what depends on it."""
    found: set[Node] = set()
    made: set[Value] = set()
    for node in program.nodes:
        if node.origin.phase == "update" or any(v in made for v in node.ins):
            found.add(node)
            made.update(node.outs)
    return found


def _is_ordered(node: Node) -> bool:
    """True for nodes that keep their order among each other."""
    sends = isinstance(node.op, Carry) and node.op.communicates
    return sends or draws(node.op) or asserts(node.op)


def _keeps_order(program: Program, region: set[Node]) -> bool:
    """True where the region can run behind the rest and everything ordered stays in order."""
    ordered = [node in region for node in program.nodes if _is_ordered(node)]
    return ordered == sorted(ordered)


def _sides(program: Program, region: set[Node]) -> dict[Node, Any]:
    """Whether a node of the region needs one that is ordered, and whether one that is ordered needs it.

    Groups of nodes that are alike in this cannot need each other; a node of which both are true is like no other.
    """
    flow = [(n, n.ins, n.outs) for n in program.nodes if n in region]
    behind, before = _reached(flow), _reached([(n, outs, ins) for n, ins, outs in reversed(flow)])
    return {n: n if n in behind and n in before else (n in behind, n in before) for n in region}


def _reached(flow: Iterable[tuple[Node, Iterable[Value], Iterable[Value]]]) -> set[Node]:
    """The nodes that there is a way to from an ordered one; each comes with what leads to it and what leads on."""
    found: set[Node] = set()
    touched: set[Value] = set()
    for node, to, on in flow:
        if any(v in touched for v in to):
            found.add(node)
        if node in found or _is_ordered(node):
            touched.update(on)
    return found


@dataclass(eq=False)
class _Unit:
    """Nodes that become one: `node` is what stands for them, `at` the place of the first."""

    nodes: list[Node]
    node: Node
    at: int
    needs: int = 0
    feeds: list[_Unit] = field(default_factory=list["_Unit"])


def _units(program: Program, region: set[Node], least: int, sides: Mapping[Node, Any]) -> Iterator[_Unit]:
    """The nodes of the region, those of one formula and one side together."""
    place = {node: at for at, node in enumerate(program.nodes)}
    formulas = _Formulas({i.value: (i.role, str(i.name.rpartition(".")[2])) for i in program.inputs})
    alike: dict[Any, list[Node]] = {}
    for node in program.nodes:
        if node in region:
            key = formulas.of(node), sides.get(node)
            alike.setdefault(key if node.op in FOREACH and not _is_ordered(node) else node, []).append(node)
    for nodes in alike.values():
        made = _together(nodes) if len(nodes) >= max(least, 2) else None
        yield from [_Unit(nodes, made, place[nodes[0]])] if made else [_Unit([n], n, place[n]) for n in nodes]


def _together(nodes: Sequence[Node]) -> Node | None:
    """One node for all, on lists."""
    columns: Columns = tuple(map(list, zip(*(n.args for n in nodes), strict=True)))
    named = {key: [n.kwargs[key] for n in nodes] for key in nodes[0].kwargs}
    call = FOREACH[nodes[0].op](columns, named)
    if call is None:
        return None
    op, args, kwargs = call
    return Node(op, args, kwargs, [n.out for n in nodes], replace(nodes[0].origin, layer=""))


@dataclass
class _Formulas:
    """What a value is computed by, as one number for each formula; inputs count by their role and what they are for."""

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


def _sorted(units: Sequence[_Unit]) -> Iterator[_Unit]:
    """Each behind what it reads, else in the order of the program."""
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
    """True when all are one value, or equal constants of one type."""
    first = items[0]
    if any(isinstance(v, Value) for v in (first, *values_in(tuple(items)))):
        return all(v is first for v in items)
    return all(type(v) is type(first) and v == first for v in items)
