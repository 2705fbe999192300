"""Linear tail of a program: the last operations on a value that may as well be applied to a sum of such values."""

from __future__ import annotations

import torch

from meshwright.reshard import AllGather, AllReduce, AllToAll, Exchange, ReduceScatter, Slice, View

from ..program.node import Conversion, Node, Value
from ..program.program import Program

aten = torch.ops.aten

LINEAR = {aten.t.default, aten.view.default, aten._unsafe_view.default, aten.transpose.int, aten.permute.default}
"""Linear operators of one operand."""

SUMS = (AllReduce, ReduceScatter, AllGather, AllToAll, Exchange, Slice, View)
"""Conversion steps that are linear if they reduce by sum or average."""


def linear_tail(program: Program, v: Value) -> list[Node]:
    """Return the linear nodes from the producer of `v` back to the earliest that communicates; empty if none does."""
    found: list[Node] = []
    node = program.producers.get(v)
    while node is not None and is_linear(node):
        found.append(node)
        node = program.producers.get(node.ins[0])
    while found and not (isinstance(found[-1].op, Conversion) and found[-1].op.communicates):
        found.pop()
    return found


def is_linear(node: Node) -> bool:
    """True if the node is linear in its first operand: f(x + y) = f(x) + f(y)."""
    if isinstance(node.op, Conversion):
        return isinstance(node.op.step, SUMS) and getattr(node.op.step, "op", "sum") in ("sum", "avg")
    return node.op in LINEAR
