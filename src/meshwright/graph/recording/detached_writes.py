"""Check for writes through `.data` to a tensor that an earlier operator saved for its backward pass.

On one device, such a backward pass reads the new elements. A program keeps the value that the operator read, so its
gradients would differ.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from .._errors import CaptureError
from ..program.backward_reads import distinct_tensors
from ..program.effects import is_view
from ..program.node import Node, Value
from ..program.program import Program


@dataclass(frozen=True, slots=True)
class DetachedWrite:
    """A write that autograd does not see: the value before it, the number of nodes before it, and the user's line."""

    before: Value
    nodes: int
    where: str


def check_late_writes(program: Program, writes: Iterable[DetachedWrite]) -> None:
    """Raise CaptureError for a write that would change what a backward pass in eager mode reads."""
    for write in writes:
        node = _saving_node(program, write)
        if node is not None:
            raise CaptureError(
                f"capturing {write.where or 'the forward pass'}",
                f"a write through .data or detach() to a tensor that {node.op} at {node.origin.where} reads",
                f"in eager mode the backward pass of {node.op} reads the new numbers, but a program keeps the old ones",
                "write before the operator, or after the backward pass (between steps)",
            )


def _saving_node(program: Program, write: DetachedWrite) -> Node | None:
    """Return the node before the write whose backward pass reads the written memory."""
    earlier, live = program.nodes[: write.nodes], _with_gradients(program)
    shown = _views_of(earlier, write.before)
    for node in earlier:
        if live.isdisjoint(node.outs):
            continue
        read = program.reads_back[node]
        if not shown.isdisjoint([*_tensors_at(node.ins, read.ins), *_tensors_at(node.outs, read.outs)]):
            return node
    return None


def _tensors_at(values: Sequence[Value], places: Collection[int]) -> list[Value]:
    """Return the tensors at these positions in the list of distinct tensors."""
    return [v for place, v in enumerate(distinct_tensors(values)) if place in places]


def _views_of(nodes: Sequence[Node], value: Value) -> set[Value]:
    """Return the value and all views of it."""
    found = {value}
    for node in nodes:
        if is_view(node.op) and node.ins and node.ins[0] in found:
            found.update(node.outs)
    return found


def _with_gradients(program: Program) -> set[Value]:
    """Return the values that receive a gradient from the results."""
    live = program.trained & set(program.results)
    found = set(live)
    for node in reversed(program.nodes):
        if node.origin.grad and not found.isdisjoint(node.outs) and not str(node.op).startswith("aten.detach"):
            found |= program.trained & set(node.ins)
    return found
