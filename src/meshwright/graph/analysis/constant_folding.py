"""Constant folding: computes every value that depends on constants alone, to compare two passes of one call.

A forward pass may fill a cache the first time, such as a table of angles by the length of a sequence. The first pass
computes the table by operators, and for the second pass the table is a constant. After folding, both programs are the
same. Buffers that the program does not write count as constants.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from meshwright.layout import TorchValue

from ..program.effects import is_needed, is_pure
from ..program.node import Node, Value, bind_values, map_values, name_of, tensor_dtype, values_in
from ..program.program import Input, Program
from ..torch_hooks import Operator


@dataclass(frozen=True, slots=True)
class Folded:
    """The text of a folded program, and its constants in the order in which they are read first."""

    text: str
    constants: tuple[Tensor, ...]

    def equals(self, other: Folded) -> bool:
        """True if the programs are the same, with the same numbers."""
        pairs = zip(self.constants, other.constants, strict=False)
        return self.text == other.text and all(not a.is_meta and torch.equal(a, b) for a, b in pairs)


def folded(program: Program, buffers: Mapping[str, Tensor]) -> Folded:
    """Return the program with its constant values computed; `buffers` are those of the model by name.

    Raises the error of an operator that cannot run now.
    """
    known = constant_values(program, buffers)
    left = [node for node in program.nodes if known.keys().isdisjoint(node.outs)]
    nodes = _needed(left, program)
    read = dict.fromkeys(v for v in _read_values(nodes, program) if v in known)
    given = [i for i in program.inputs if i.value not in known] + [Input(v, "constant", "") for v in read]
    bare = Program(tuple(given), tuple(nodes), program.outputs, program.writes)
    constants = tuple(known[v] for v in read if isinstance(known[v], Tensor))
    return Folded(_renamed(bare).numbered_text, constants)


def constant_values(program: Program, buffers: Mapping[str, Tensor]) -> dict[Value, Any]:
    """Return the values that depend on constants and unwritten buffers alone, with their tensors or numbers."""
    known = _constants(program, buffers)
    with torch.no_grad():
        for node in program.nodes:
            if _is_constant(node, known):
                bind_values(node.out, _computed(node, known), known)
    return known


def _constants(program: Program, buffers: Mapping[str, Tensor]) -> dict[Value, Any]:
    written = {v for v, _ in program.writes}
    found: dict[Value, Any] = {}
    for given in program.inputs:
        source = buffers.get(given.name) if given.role == "buffer" else given.source
        held = given.role in ("buffer", "constant") and isinstance(source, Tensor) and not source.requires_grad
        if held and given.value not in written:
            found[given.value] = source
    return found


def _is_constant(node: Node, known: Mapping[Value, Any]) -> bool:
    plain = isinstance(node.op, Operator) and is_pure(node.op) and node.origin.autocast is None
    of_constants = all(v in known for v in node.ins) or name_of(node.op) in _OF_SHAPE
    return plain and of_constants and all(map(_is_fixed, (*node.ins, *node.outs)))


_OF_SHAPE = frozenset(
    f"aten.{name}.default" for name in ("ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full")
)
"""Operators that read only the shape and the dtype of a tensor."""


def _is_fixed(v: Value) -> bool:
    return all(type(size) is int for size in v.shape)


def _computed(node: Node, known: Mapping[Value, Any]) -> TorchValue:
    def operand(v: Value) -> TorchValue:
        return known[v] if v in known else torch.empty(v.shape, dtype=tensor_dtype(v), device=v.device)

    args, kwargs = node.mapped_arguments(operand)
    assert isinstance(node.op, Operator)
    return node.op(*args, **kwargs)


def _needed(nodes: Sequence[Node], program: Program) -> list[Node]:
    """Return the nodes that have side effects or values that are read."""
    needed, found = set(program.results), list[Node]()
    for node in reversed(nodes):
        if is_needed(node.op, node.args, node.outs, needed):
            needed.update(node.ins)
            found.append(node)
    return found[::-1]


def _read_values(nodes: Sequence[Node], program: Program) -> Iterator[Value]:
    for node in nodes:
        yield from node.ins
    yield from values_in(program.outputs)
    yield from (v for _, v in program.writes)


@dataclass(slots=True)
class _Names:
    """Values under new names, numbered in the order of their first use."""

    values: dict[Value, Value] = field(default_factory=dict[Value, Value])

    def renamed(self, v: Value) -> Value:
        return self.values.setdefault(v, replace(v, name=f"v{len(self.values)}"))

    def renamed_tree(self, tree: TorchValue) -> TorchValue:
        return map_values(self.renamed, tree)


def _renamed(program: Program) -> Program:
    names = _Names()
    inputs = tuple(replace(i, value=names.renamed(i.value)) for i in program.inputs)
    nodes = tuple(replace(n.with_operands(names.renamed), out=names.renamed_tree(n.out)) for n in program.nodes)
    writes = tuple((names.renamed(x), names.renamed(v)) for x, v in program.writes)
    return Program(inputs, nodes, names.renamed_tree(program.outputs), writes)
