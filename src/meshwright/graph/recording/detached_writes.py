"""Check for writes through `.data` to a tensor that an earlier operator saved for its backward pass.

On one device, such a backward pass reads the new elements. A program keeps the value that the operator read, so its
gradients would differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
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


def check_late_writes(program: Program, writes: Sequence[DetachedWrite]) -> None:
    """Raise CaptureError for a write that would change what a backward pass in eager mode reads."""
    if not writes:
        return
    uses, trained = _uses_of(program), _with_gradients(program)
    for write in writes:
        node = _saving_node(program, write, uses, trained)
        if node is not None:
            raise CaptureError(
                f"capturing {write.where or 'the forward pass'}",
                f"a write through .data or detach() to a tensor that {node.op} at {node.origin.where} reads",
                f"in eager mode the backward pass of {node.op} reads the new numbers, but a program keeps the old ones",
                "write before the operator, or after the backward pass (between steps)",
            )


def _uses_of(program: Program) -> dict[Value, list[int]]:
    """Return, for each value, the positions of the nodes that read it or return it."""
    uses: dict[Value, list[int]] = defaultdict(list)
    for at, node in enumerate(program.nodes):
        for value in dict.fromkeys([*node.ins, *node.outs]):
            uses[value].append(at)
    return uses


def _saving_node(
    program: Program, write: DetachedWrite, uses: Mapping[Value, Sequence[int]], trained: Collection[Value]
) -> Node | None:
    """Return the first node before the write whose backward pass reads the written memory."""
    shown = _views_of(program, write, uses)
    near = sorted({at for value in shown for at in uses.get(value, ()) if at < write.nodes})
    for node in map(program.nodes.__getitem__, near):
        if not any(out in trained for out in node.outs):
            continue
        read = program.reads_back[node]
        if not shown.isdisjoint([*_tensors_at(node.ins, read.ins), *_tensors_at(node.outs, read.outs)]):
            return node
    return None


def _tensors_at(values: Sequence[Value], places: Collection[int]) -> list[Value]:
    """Return the tensors at these positions in the list of distinct tensors."""
    return [v for place, v in enumerate(distinct_tensors(values)) if place in places]


def _views_of(program: Program, write: DetachedWrite, uses: Mapping[Value, Sequence[int]]) -> set[Value]:
    """Return the written value and all views of it that were taken before the write."""
    found, todo = {write.before}, [write.before]
    while todo:
        value = todo.pop()
        for at in uses.get(value, ()):
            node = program.nodes[at]
            if at < write.nodes and is_view(node.op) and node.ins and node.ins[0] is value:
                todo += [out for out in node.outs if out not in found]
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
