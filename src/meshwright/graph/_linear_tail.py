"""What the end of a program does to a value that may as well be done to a sum of such values."""

from __future__ import annotations

import torch

from meshwright.reshard import AllGather, AllReduce, AllToAll, Exchange, ReduceScatter, Slice, View

from ._node import Carry, Node, Value
from ._program import Program

aten = torch.ops.aten

LINEAR = {aten.t.default, aten.view.default, aten._unsafe_view.default, aten.transpose.int, aten.permute.default}
"""Operators of one operand that a sum goes through."""

SUMS = (AllReduce, ReduceScatter, AllGather, AllToAll, Exchange, Slice, View)
"""Steps that a sum goes through, as far as they do not take maxima or products."""


def linear_tail(program: Program, v: Value) -> list[Node]:
    """The nodes that a sum goes through, from `v` down to the first that communicates; none where none does."""
    found: list[Node] = []
    node = program.producers.get(v)
    while node is not None and is_linear(node):
        found.append(node)
        node = program.producers.get(node.ins[0])
    while found and not (isinstance(found[-1].op, Carry) and found[-1].op.communicates):
        found.pop()
    return found


def is_linear(node: Node) -> bool:
    """True where a sum of results is the result of the sum of first operands."""
    if isinstance(node.op, Carry):
        return isinstance(node.op.step, SUMS) and getattr(node.op.step, "op", "sum") in ("sum", "avg")
    return node.op in LINEAR
