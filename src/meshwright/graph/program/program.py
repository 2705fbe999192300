"""Programs: operators on values in order, in single-assignment form, with inputs, outputs and written inputs.

A program is immutable data. Passes make new programs (`Draft`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch

from meshwright.layout import Spec, TorchValue

from .backward_reads import BackwardReads, backward_reads_of
from .layouts import Layouts
from .node import Conversion, Node, Start, Value, name_of, tensor_dtype, values_in
from .node_text import node_text, numbered, tree_text, type_text

Role = Literal["saved", "parameter", "gradient", "buffer", "state", "batch", "constant", "scalar", "number", "size"]


@dataclass(frozen=True, slots=True)
class Input:
    """An input of a program: its role, its name outside of the program, and the spec of the global tensor.

    A "scalar" is a Python number that may change from call to call. A "number" depends on the rank. `source` says where
    the input comes from. A state with a `first` number is filled with this number before the first step. A parameter
    of a captured program that gets no gradient is `frozen`.
    """

    value: Value
    role: Role
    name: str
    spec: Spec | None = None
    source: Any = None
    first: float | None = None
    frozen: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """Record of what a pass did at one place, and of the saved amounts by unit."""

    by: str
    what: str
    where: str = ""
    saved: Mapping[str, float] = field(default_factory=dict[str, float])

    def __str__(self) -> str:
        saved = ", ".join(f"{amount:g} {unit}" for unit, amount in self.saved.items())
        return (
            f"{self.by}: {self.what}" + (f" at {self.where}" if self.where else "") + (f" ({saved})" if saved else "")
        )


@dataclass(frozen=True)
class Program:
    """A program of a rank. `writes` are pairs (input, its value afterwards); `outputs` is any tree of values.

    Shapes of values are local shapes on `rank`. `specs` are the specs of the global tensors, if known.
    """

    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    outputs: TorchValue
    writes: tuple[tuple[Value, Value], ...] = ()
    changes: tuple[Change, ...] = ()
    rank: int = 0
    specs: Mapping[Value, Spec] = field(default_factory=dict[Value, Spec], repr=False)

    def all_values(self) -> Iterator[Value]:
        """Yield the values of the inputs, then the values that the nodes produce, in order."""
        yield from (given.value for given in self.inputs)
        yield from (v for node in self.nodes for v in node.outs)

    @cached_property
    def producers(self) -> Mapping[Value, Node]:
        """Value → node that produces it; inputs are not included."""
        return {v: node for node in self.nodes for v in node.outs}

    @cached_property
    def users(self) -> Mapping[Value, tuple[Node, ...]]:
        """Value → nodes that read it, in order, each once."""
        found: dict[Value, dict[Node, None]] = {}
        for node in self.nodes:
            for v in node.ins:
                found.setdefault(v, {})[node] = None
        return {v: tuple(nodes) for v, nodes in found.items()}

    @cached_property
    def trained(self) -> frozenset[Value]:
        """Values that may receive a gradient: parameters that are not frozen, and float values that depend on them."""
        given = (i.value for i in self.inputs if i.role == "parameter" and not i.frozen)
        found = {v for v in given if tensor_dtype(v).is_floating_point}
        for node in self.nodes:
            if not found.isdisjoint(node.ins):
                found |= {v for v in node.outs if v.is_tensor and tensor_dtype(v).is_floating_point}
        return frozenset(found)

    @cached_property
    def reads_back(self) -> Mapping[Node, BackwardReads]:
        """Node of a forward pass → operands and results that its backward pass reads."""
        return backward_reads_of(self.nodes, self.trained)

    @cached_property
    def device(self) -> torch.device:
        """The device of the first tensor that is not on the CPU; the CPU if there is none."""
        names = (v.device for v in self.all_values() if v.is_tensor)
        return torch.device(next((name for name in names if name != "cpu"), "cpu"))

    @property
    def results(self) -> tuple[Value, ...]:
        """The values that are needed at the end: outputs and written values."""
        return (*values_in(self.outputs), *(v for _, v in self.writes))

    @property
    def layouts(self) -> Layouts:
        """The known layouts of the global tensors, as a table.

        A value that a pass removed has no row: another value may have its name.
        """
        known = {i.value for i in self.inputs}.union(*(node.outs for node in self.nodes))
        return Layouts({v.name: spec for v, spec in self.specs.items() if v in known})

    def __str__(self) -> str:
        return self.text()

    def text(self, where: bool = False) -> str:
        """Return the text of the program; with `where`, each line ends with the node's phase, layer and source line.

        >>> print(Program((), (), None))
        program ()
          return None
        """
        lines = [f"program ({', '.join(f'{i.value!r}: {type_text(i.value)}' for i in self.inputs)})"]
        lines += [f"  {node_text(node, where)}" for node in self.nodes]
        lines += [f"  {x!r} <- {v!r}" for x, v in self.writes]
        lines.append(f"  return {tree_text(self.outputs)}")
        return "\n".join(lines)

    @cached_property
    def numbered_text(self) -> str:
        """The text with source lines, and with numbered symbols: equal for two recordings of the same code."""
        return numbered(self.text(where=True))

    def with_changes(self, *changes: Change) -> Program:
        return replace(self, changes=(*self.changes, *changes))


def communication(program: Program, phase: str | None = None) -> Iterator[Node]:
    """Yield the nodes in which ranks communicate, in order; with `phase`, only those of this phase."""
    for node in program.nodes:
        op = node.op.carry if isinstance(node.op, Start) else node.op
        if isinstance(op, Conversion) and op.communicates and phase in (None, node.origin.phase):
            yield node


def communication_text(program: Program) -> str:
    """Return one line per collective: phase, layer, step, and the type of its operand."""
    rows = [
        f"{node.origin.phase:8} {node.origin.layer:24} {node.op!r} {type_text(next(values_in(node.args)))}"
        for node in communication(program)
    ]
    return "\n".join(row.rstrip() for row in rows)


def count_ops(nodes: Sequence[Node]) -> dict[str, int]:
    """Return the number of calls of each operator by name."""
    found: dict[str, int] = {}
    for node in nodes:
        found[name_of(node.op)] = found.get(name_of(node.op), 0) + 1
    return found
