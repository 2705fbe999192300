"""Concatenation of two programs: the second one reads values of the first one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    names = FreshNames(v for v in _names(first))
    same = {_key(i): i.value for i in first.inputs if _is_one(i)}
    written = dict(first.writes)
    became: dict[Value, Value] = dict(feeds)
    added: list[Input] = []
    for given in second.inputs:
        if given.value in became:
            continue
        known = same.get(_key(given)) if _is_one(given) else None
        if known is not None:
            became[given.value] = written.get(known, known)
        else:
            became[given.value] = _renamed(given.value, names)
            added.append(replace(given, value=became[given.value]))
    nodes = [_moved(node, became, names) for node in second.nodes]
    home = {i.value: same.get(_key(i), became[i.value]) if _is_one(i) else became[i.value] for i in second.inputs}
    writes = written | {home[x]: became[v] for x, v in second.writes if x not in feeds}
    out = outputs(first.outputs, map_values(lambda v: became[v], second.outputs))
    return Program(
        (*first.inputs, *added),
        (*first.nodes, *nodes),
        out,
        tuple(writes.items()),
        (*first.changes, *second.changes),
        first.rank,
        {**first.specs, **{became[v]: spec for v, spec in second.specs.items() if v in became}},
    )


def _is_one(given: Input) -> bool:
    """True if inputs with an equal key are one input. Saved inputs and lifted constants are always separate."""
    return given.role != "saved" and not (given.role == "constant" and is_lifted(given.source))


def _key(given: Input) -> Any:
    """Return the key that identifies an input. The key of a rank number is its source, since its name may differ."""
    if given.role == "constant":
        return given.role, id(given.source)
    return given.role, given.source if given.role == "number" else given.name


def _moved(node: Node, became: dict[Value, Value], names: FreshNames) -> Node:
    args, kwargs = map_values(lambda v: became[v], (node.args, dict(node.kwargs)))
    for v in node.outs:
        became[v] = _renamed(v, names)
    return Node(node.op, args, kwargs, map_values(lambda v: became[v], node.out), node.origin)


def _renamed(v: Value, names: FreshNames) -> Value:
    return Value(names.fresh(v.name), v.shape, v.dtype, v.device)


def _names(program: Program) -> Any:
    for given in program.inputs:
        yield given.value.name
    for node in program.nodes:
        yield from (v.name for v in node.outs)
