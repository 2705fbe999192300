"""Concatenation of two programs: the second one reads values of the first one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any

from ..program.node import Node, Value, map_values
from ..program.program import Input, Program
from ..program.shape_inference import FreshNames
from ..recording.recording import is_lifted


def join_programs(
    first: Program, second: Program, feeds: Mapping[Value, Value], outputs: Callable[[Any, Any], Any]
) -> Program:
    """Return the program that runs `first`, then `second`. `feeds` maps inputs of `second` to values of `first`.

    Inputs of equal role and name become one input, except saved ones; so do constants that are one tensor of the user.
    If `first` writes to such an input, `second` reads the written value. `outputs(a, b)` returns the outputs of the
    whole program for those of both parts.
    """
    names, written, shared = FreshNames(first.all_values()), dict(first.writes), _shared_inputs(first, second)
    became = {x: written.get(same, same) for x, same in shared.items()} | dict(feeds)
    added = {i.value: replace(i, value=_renamed(i.value, names)) for i in second.inputs if i.value not in became}
    became |= {v: new.value for v, new in added.items()}
    nodes = [_renamed_node(node, became, names) for node in second.nodes]
    writes = written | {shared.get(x, became[x]): became[v] for x, v in second.writes if x not in feeds}
    return Program(
        (*first.inputs, *added.values()),
        (*first.nodes, *nodes),
        outputs(first.outputs, map_values(became.__getitem__, second.outputs)),
        tuple(writes.items()),
        (*first.changes, *second.changes),
        first.rank,
        {**first.specs, **{became[v]: spec for v, spec in second.specs.items() if v in became}},
    )


def _shared_inputs(first: Program, second: Program) -> dict[Value, Value]:
    """Return the inputs of `second` that are inputs of `first` too, each with the value that it has there."""
    known = {_key(i): i.value for i in first.inputs}
    return {i.value: known[_key(i)] for i in second.inputs if _key(i) in known}


def _key(given: Input) -> Hashable:
    """Return a key that is equal for inputs that become one.

    Saved inputs and lifted constants are always separate. A rank number is identified by its source, since its name may
    differ.
    """
    match given.role:
        case "saved":
            return given.value
        case "constant":
            return given.value if is_lifted(given.source) else (given.role, id(given.source))
        case "number":
            return given.role, given.source
        case _:
            return given.role, given.name


def _renamed_node(node: Node, became: dict[Value, Value], names: FreshNames) -> Node:
    """Return the node on the values in `became`; its renamed results are added to them."""
    became.update((v, _renamed(v, names)) for v in node.outs)
    return replace(node.with_operands(became.__getitem__), out=map_values(became.__getitem__, node.out))


def _renamed(v: Value, names: FreshNames) -> Value:
    return replace(v, name=names.fresh(v.name))
