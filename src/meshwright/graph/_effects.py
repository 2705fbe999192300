"""What a node does beside giving values: which may be left out, moved, or done once for two."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch

from meshwright.reshard import Exchange

from ._node import Carry, Node, OnCopy, Op, Over, Start, Value, Wait, values_in
from .torch_hooks import Operator


def writes_to(op: Op) -> tuple[int | str, ...]:
    """The arguments of `op` that it writes to: places, or names of keyword arguments."""
    if isinstance(op, Over):
        return op.places
    if not isinstance(op, Operator):
        return ()
    found: list[int | str] = []
    for at, a in enumerate(op._schema.arguments):
        if a.alias_info is not None and a.alias_info.is_write:
            found.append(a.name if a.kwarg_only else at)
    return tuple(found)


def draws(op: Op) -> bool:
    """True when `op` draws random numbers: it keeps its place among those that do."""
    if isinstance(op, (OnCopy, Over)):
        return draws(op.op)
    return isinstance(op, Operator) and torch.Tag.nondeterministic_seeded in op.tags


def is_drawing(node: Node) -> bool:
    """True when the call draws: attention that drops nothing does not, though its operator can."""
    if not draws(node.op) or not isinstance(node.op, Operator):
        return draws(node.op)
    given = dict(zip((a.name for a in node.op._schema.arguments), node.args, strict=False)) | dict(node.kwargs)
    left = next((a for a in node.op._schema.arguments if a.name == "dropout_p"), None)
    return left is None or given.get("dropout_p", left.default_value) != 0


def is_pure(op: Op) -> bool:
    """True when two calls with the same arguments give the same, and a call that nobody reads may be left out."""
    return not writes_to(op) and not draws(op) and not asserts(op)


def crosses(op: Op) -> bool:
    """True for steps from one mesh to another."""
    carry = op.carry if isinstance(op, (Start, Wait)) else op
    return isinstance(carry, Carry) and isinstance(carry.step, Exchange)


def asserts(op: Op) -> bool:
    """True for operators that are there to fail."""
    return isinstance(op, Operator) and "assert" in op._schema.name


def is_view(op: Op) -> bool:
    """True when results may share memory with arguments."""
    if isinstance(op, Carry):
        return not op.communicates
    if not isinstance(op, Operator):
        return False
    return any(r.alias_info is not None for r in op._schema.returns) or op._schema.name == "aten::reshape"


def is_needed(op: Op, args: Sequence[Any], outs: Sequence[Value], needed: Container[Value]) -> bool:
    """True when a node must stay, where `needed` are the values that are read behind it or are results.

    A drawing stays, since those behind it would draw other numbers without it; so does what goes to another mesh,
    whose ranks have programs of their own.
    """
    if draws(op) or asserts(op) or crosses(op) or any(v in needed for v in outs):
        return True
    written = [args[at] for at in writes_to(op) if isinstance(at, int) and at < len(args)]
    return any(v in needed for v in values_in(written)) or bool(writes_to(op) and not written)
