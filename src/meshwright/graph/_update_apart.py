"""Execution of a training step in two parts, so that its gradients can be inspected before the update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ._effects import writes_to
from ._execute import exchanged, origin_of, reducing_over, reductions_over, to_fx
from ._node import Node, Value, values_in
from ._program import Input, Program

LookAt = Callable[[Mapping[str, Any]], bool]
"""Function that is called with the gradients by parameter name; it returns True to skip the update."""


@dataclass(frozen=True, slots=True)
class InTwo:
    """A step whose update is a separate part. A call returns None for the written values if the update is skipped."""

    first: Callable[..., Any]
    second: Callable[..., Any]
    gradients: tuple[tuple[str, int], ...]
    """The name of each parameter, and the index of its gradient among the results of the first part."""
    exchanged: tuple[int, ...]

    def __call__(self, given: Sequence[Any], look_at: LookAt) -> tuple[Any, list[Any] | None]:
        with torch.no_grad():
            outputs, crossing = self.first(*given)
            if look_at({name: crossing[at] for name, at in self.gradients}):
                return outputs, None
            _, written = self.second(*given, *crossing)
            for at in self.exchanged:
                written[at] = written[at].clone()
            return outputs, written


def in_two(program: Program) -> InTwo | None:
    """Return the step in two parts; None if it has no update, or if it cannot be split.

    The first part must be able to run before the whole update: it overwrites nothing that the update reads, and the
    outputs of the program do not depend on the update.
    """
    update = _update(program)
    first = [node for node in program.nodes if node not in update]
    made = {v for node in first for v in node.outs}
    crossing = _crossing(program, update, made)
    if not update or not _may_come_first(program, update) or _results_of(program) & _made_by(update):
        return None
    over = {n: op for n, op in reductions_over(program).items() if n in update or n.ins[0] not in crossing}

    def op_of(node: Node) -> Any:
        return reducing_over(over[node], node.origin.purpose) if node in over else None

    begin = to_fx(replace(program, nodes=first), op_of, results=(program.outputs, list(crossing)))
    inputs = (*program.inputs, *[Input(v, "batch", v.name) for v in crossing])
    end = to_fx(
        replace(program, inputs=inputs, nodes=[n for n in program.nodes if n in update]), op_of,
        results=((), [v for _, v in program.writes]),
    )  # fmt: skip
    at = {v: n for n, v in enumerate(crossing)}
    gradients = tuple((name, at[v]) for v, name in _goes_to(program, update, at).items())
    return InTwo(begin, end, gradients, exchanged(program))


def _update(program: Program) -> set[Node]:
    """Return the nodes of the update, and all nodes that depend on them."""
    found, made = set[Node](), set[Value]()
    for node in program.nodes:
        if node.origin.phase == "update" or not made.isdisjoint(node.ins):
            found.add(node)
            made.update(node.outs)
    return found


def _crossing(program: Program, update: set[Node], made: set[Value]) -> tuple[Value, ...]:
    """Return the values of the first part that the update reads or the program writes."""
    read = [v for node in program.nodes if node in update for v in node.ins]
    return tuple(v for v in dict.fromkeys([*read, *[v for _, v in program.writes]]) if v in made)


def _may_come_first(program: Program, update: set[Node]) -> bool:
    """True if no node of the first part that comes after a node of the update writes in place."""
    began = False
    for node in program.nodes:
        began |= node in update
        if began and node not in update and writes_to(node.op):
            return False
    return True


def _results_of(program: Program) -> set[Value]:
    return set(values_in(program.outputs))


def _made_by(nodes: set[Node]) -> set[Value]:
    return {v for node in nodes for v in node.outs}


def _goes_to(program: Program, update: set[Node], crossing: Mapping[Value, int]) -> dict[Value, str]:
    """Return the gradients with the names of their parameters.

    A gradient is a value of the first part that a node of the update reads together with a parameter or its state.
    """
    names = {i.value: i.source[0] if i.role == "state" else i.name for i in program.inputs if i.role in _OWNERS}
    found: dict[Value, str] = {}
    for node in program.nodes:
        for row in _rows(node) if node in update else ():
            owners = [names[root] for v in row if (root := origin_of(program, v)) in names]
            for v in row:
                if owners and v in crossing and v.is_tensor:
                    found.setdefault(v, owners[0])
    return found


_OWNERS = ("parameter", "state")


def _rows(node: Node) -> Iterator[tuple[Value, ...]]:
    """Yield the groups of values that a call combines: for list arguments, the values at one index."""
    lists = [list(a) for a in node.args if isinstance(a, (list, tuple)) and a and isinstance(a[0], Value)]
    if lists:
        yield from zip(*[each for each in lists if len(each) == len(lists[0])], strict=True)
    else:
        yield tuple(node.ins)
