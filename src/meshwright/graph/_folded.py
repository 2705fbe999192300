"""Programs in which everything is computed that is made of constants alone: for the comparison of two passes.

A forward pass may fill a cache the first time, such as a table of angles by the length of a sequence. The first pass
makes the table by operators, and in the second one it is a constant. Folded, both are the same program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ._effects import is_pure
from ._node import Node, Value, map_values, values_in
from ._program import Input, Program
from ._text import numbered
from .torch_hooks import Operator, interception_off


@dataclass(frozen=True, slots=True)
class Folded:
    """The text of a folded program, and its constants in the order in which they are read first."""

    text: str
    constants: tuple[Tensor, ...]

    def equals(self, other: Folded) -> bool:
        """True if the programs are the same, with the same numbers."""
        pairs = zip(self.constants, other.constants, strict=False)
        return self.text == other.text and all(torch.equal(a, b) for a, b in pairs)


def folded(program: Program, new_buffers: Mapping[str, Tensor] | None = None) -> Folded:
    """Return the program with its constant values computed; `new_buffers`, by name, count as constants.

    Raises what an operator raises that cannot be computed now.
    """
    known = _constants(program, new_buffers or {})
    nodes: list[Node] = []
    with interception_off(), torch.no_grad():
        for node in program.nodes:
            if _is_constant(node, known):
                _bind(node.out, _computed(node, known), known)
            else:
                nodes.append(node)
    given = [i for i in program.inputs if i.value not in known]
    read = [v for v in _read(nodes, program) if v in known]
    given += [Input(v, "constant", "") for v in dict.fromkeys(read)]
    bare = Program(tuple(given), tuple(nodes), program.outputs, program.writes)
    constants = tuple(known[v] for v in dict.fromkeys(read) if isinstance(known[v], Tensor))
    return Folded(numbered(_renamed(bare).text(where=True)), constants)


def _constants(program: Program, new_buffers: Mapping[str, Tensor]) -> dict[Value, Any]:
    written = {v for v, _ in program.writes}
    found: dict[Value, Any] = {}
    for given in program.inputs:
        source = new_buffers.get(given.name) if given.role == "buffer" else given.source
        held = given.role in ("buffer", "constant") and type(source) is Tensor and not source.requires_grad
        if held and given.value not in written:
            found[given.value] = source
    return found


def _is_constant(node: Node, known: Mapping[Value, Any]) -> bool:
    plain = isinstance(node.op, Operator) and is_pure(node.op) and node.origin.autocast is None
    return plain and all(v in known for v in node.ins) and all(map(_is_fixed, node.outs))


def _is_fixed(v: Value) -> bool:
    return all(type(size) is int for size in v.shape)


def _computed(node: Node, known: Mapping[Value, Any]) -> Any:
    args, kwargs = map_values(known.__getitem__, (tuple(node.args), dict(node.kwargs)))
    assert isinstance(node.op, Operator)
    return node.op(*args, **kwargs)


def _bind(shown: Any, made: Any, known: dict[Value, Any]) -> None:
    if isinstance(shown, Value):
        known[shown] = made
    elif isinstance(shown, (tuple, list)):
        for item, value in zip(shown, made, strict=True):
            _bind(item, value, known)


def _read(nodes: list[Node], program: Program) -> Iterator[Value]:
    for node in nodes:
        yield from node.ins
    yield from values_in(program.outputs)
    yield from (v for _, v in program.writes)


@dataclass(slots=True)
class _Names:
    """Values by new names, in the order in which they are asked for."""

    values: dict[Value, Value] = field(default_factory=dict[Value, Value])

    def of(self, v: Value) -> Value:
        return self.values.setdefault(v, replace(v, name=f"v{len(self.values)}"))

    def tree(self, tree: Any) -> Any:
        return map_values(self.of, tree)


def _renamed(program: Program) -> Program:
    names = _Names()
    inputs = tuple(replace(i, value=names.of(i.value)) for i in program.inputs)
    nodes = tuple(
        Node(n.op, names.tree(tuple(n.args)), names.tree(dict(n.kwargs)), names.tree(n.out), n.origin)
        for n in program.nodes
    )
    writes = tuple((names.of(a), names.of(b)) for a, b in program.writes)
    return Program(inputs, nodes, names.tree(program.outputs), writes)
