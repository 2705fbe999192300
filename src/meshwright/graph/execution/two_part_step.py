"""Execution of a training step in two parts, so that its gradients can be inspected before the update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from meshwright.layout import TorchValue

from ..program.effects import writes_to
from ..program.node import Node, Value, values_in
from ..program.program import Input, Program
from .fx_runner import origin_of, overwriting_step_function, reductions_over, swapped_writes, to_fx

GradientInspector = Callable[[Mapping[str, Any]], bool]
"""Is called with the gradients by the names of their parameters; True if the update is to be left out."""
InspectedStep = Callable[[Sequence[Any], GradientInspector], tuple[Any, list[Any] | None]]
"""A step of given inputs: its outputs, and the values that it writes; None for these if the update is left out."""


@dataclass(frozen=True, slots=True)
class TwoPartStep:
    """A step whose update is a part of its own.

    A run returns None for the values to write if the update is left out, and no outputs that come from the update.
    """

    first: Callable[..., Any]
    second: Callable[..., Any]
    gradients: tuple[tuple[str, int], ...]
    """The name of each parameter, and the place of its gradient among the inputs and the results of the first part."""
    exchanged: tuple[int, ...]

    def __call__(self, given: Sequence[Any], look_at: GradientInspector) -> tuple[Any, list[Any] | None]:
        with torch.no_grad():
            outputs, crossing = self.first(*given)
            held = [*given, *crossing]
            if look_at({name: held[at] for name, at in self.gradients}):
                return outputs, None
            late, written = self.second(*given, *crossing)
            for at in self.exchanged:
                written[at] = written[at].clone()
            return {**outputs, **late}, written


def split_before_update(program: Program) -> TwoPartStep | None:
    """Return the step in two parts; None if it cannot be split. Without an update, the second part does nothing.

    The first part has to be able to run before the whole update: nothing in it writes over what the update reads, and
    the output "out" does not come from the update.
    """
    update = _update_nodes(program)
    early, late = _divided_outputs(program, update)
    if not _may_come_first(program, update) or "out" not in early:
        return None
    crossing = _crossing_values(program, update)
    op_of = _overwriting_functions(program, update, crossing)
    before = [node for node in program.nodes if node not in update]
    begin = to_fx(replace(program, nodes=before), op_of, results=(early, list(crossing)))
    inputs = (*program.inputs, *[Input(v, "batch", v.name) for v in crossing])
    after = [node for node in program.nodes if node in update]
    end = to_fx(replace(program, inputs=inputs, nodes=after), op_of, results=(late, [v for _, v in program.writes]))
    return TwoPartStep(begin, end, _gradient_places(program, update, crossing), swapped_writes(program))


def _overwriting_functions(
    program: Program, update: set[Node], crossing: Sequence[Value]
) -> Callable[[Node], Callable[..., TorchValue] | None]:
    """Return a function of a node: for an all-reduce that may overwrite its operand, what runs it; else None."""
    over = {n: op for n, op in reductions_over(program).items() if n in update or n.ins[0] not in crossing}
    return lambda node: overwriting_step_function(over[node], node.origin.purpose) if node in over else None


def _gradient_places(program: Program, update: set[Node], crossing: Sequence[Value]) -> tuple[tuple[str, int], ...]:
    """Return the name of each parameter, and the place of its gradient among the inputs and the crossing values."""
    place_of = {v: at for at, v in enumerate([*[i.value for i in program.inputs], *crossing])}
    saved = [i.value for i in program.inputs if i.role == "saved"]
    return tuple((name, place_of[v]) for v, name in _parameter_names(program, update, [*crossing, *saved]).items())


def _update_nodes(program: Program) -> set[Node]:
    """Return the nodes of the update, and all nodes that depend on them."""
    found, made = set[Node](), set[Value]()
    for node in program.nodes:
        if node.origin.phase == "update" or not made.isdisjoint(node.ins):
            found.add(node)
            made.update(node.outs)
    return found


def _crossing_values(program: Program, update: set[Node]) -> tuple[Value, ...]:
    """Return the values of the first part that the update reads or the program writes."""
    made = {v for node in program.nodes if node not in update for v in node.outs}
    read = [v for node in program.nodes if node in update for v in node.ins]
    given = values_in([program.outputs, [v for _, v in program.writes]])
    return tuple(v for v in dict.fromkeys([*read, *given]) if v in made)


def _may_come_first(program: Program, update: set[Node]) -> bool:
    """True if no node of the first part that comes after a node of the update writes in place."""
    began = False
    for node in program.nodes:
        began |= node in update
        if began and node not in update and writes_to(node.op):
            return False
    return True


def _divided_outputs(program: Program, update: set[Node]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the outputs that do not come from the update, and those that do."""
    made = {v for node in update for v in node.outs}
    late = {name: each for name, each in program.outputs.items() if not made.isdisjoint(values_in(each))}
    return {name: each for name, each in program.outputs.items() if name not in late}, late


def _parameter_names(program: Program, update: set[Node], given: Iterable[Value]) -> dict[Value, str]:
    """Return the given values that change a parameter or a state in the update, with the parameter's name."""
    owners = {i.value: i.source[0] if i.role == "state" else i.name for i in program.inputs if i.role in _OWNERS}
    owners |= {v: name for (name, _), v in program.outputs.get("state", {}).items()}
    found = {v: _owner_of(program, update, v, owners) for v in given if v.is_tensor}
    return {v: name for v, name in found.items() if name is not None}


def _owner_of(program: Program, update: set[Node], v: Value, owners: Mapping[Value, str]) -> str | None:
    """Return the name of the parameter that a value reaches first, or of which it reaches a state first."""
    seen, ahead = {v}, [v]
    while ahead:
        calls = [call for x in ahead for call in _update_calls(program, update, x)]
        name = _first_owner(program, owners, (y for ins, outs in calls for y in (*ins, *outs)))
        if name is not None:
            return name
        ahead = list(dict.fromkeys(y for _, outs in calls for y in outs if y not in seen))
        seen.update(ahead)
    return None


def _first_owner(program: Program, owners: Mapping[Value, str], values: Iterable[Value]) -> str | None:
    """Return the name of the parameter of the first value that is one, is a state of one, or is a view of these."""
    for v in values:
        for x in (origin_of(program, v), v):
            if x in owners:
                return owners[x]
    return None


_OWNERS = ("parameter", "state")
Call = tuple[Sequence[Value], Sequence[Value]]
"""The operands of a call, and its results."""


def _update_calls(program: Program, update: set[Node], v: Value) -> Iterator[Call]:
    """Yield the calls of the update that read a value."""
    for node in program.users.get(v, ()):
        if node in update:
            yield from _calls(node, v)


def _calls(node: Node, v: Value) -> Iterator[Call]:
    """Yield what is computed with a value, and what is made of it: of lists, the entries at one place."""
    lists = [list(a) for a in node.args if isinstance(a, (list, tuple)) and a and isinstance(a[0], Value)]
    if not lists:
        yield node.ins, node.outs
        return
    rows = zip(*[each for each in lists if len(each) == len(lists[0])], strict=True)
    for at, row in enumerate(rows):
        if v in row:
            yield row, node.outs[at : at + 1] if len(node.outs) == len(lists[0]) else node.outs
