"""Side effects of nodes: predicates that say which nodes may be removed, moved or merged."""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import lru_cache
from typing import Any

import torch

from meshwright.reshard import Exchange

from ..torch_hooks import Operator
from .node import Conversion, Node, Op, Overwrite, Start, Value, Wait, WriteToCopies, values_in


def writes_to(op: Op) -> tuple[int | str, ...]:
    """Return the arguments of `op` that it writes to: positions, or names of keyword arguments."""
    if isinstance(op, Overwrite):
        return op.places
    return _written_arguments(op) if isinstance(op, Operator) else ()


@lru_cache(maxsize=4096)
def _written_arguments(op: Operator) -> tuple[int | str, ...]:
    found: list[int | str] = []
    for at, a in enumerate(op._schema.arguments):
        if a.alias_info is not None and a.alias_info.is_write:
            found.append(a.name if a.kwarg_only else at)
    return tuple(found)


def is_random_operator(op: Op) -> bool:
    """True if `op` draws random numbers. Such operators keep their order."""
    if isinstance(op, (WriteToCopies, Overwrite)):
        return is_random_operator(op.op)
    return isinstance(op, Operator) and _draws(op)


@lru_cache(maxsize=4096)
def _draws(op: Operator) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags


def is_random_call(node: Node) -> bool:
    """True if the call draws random numbers. Attention with `dropout_p=0` does not, though its operator can."""
    if not is_random_operator(node.op) or not isinstance(node.op, Operator):
        return is_random_operator(node.op)
    given = dict(zip((a.name for a in node.op._schema.arguments), node.args, strict=False)) | dict(node.kwargs)
    left = next((a for a in node.op._schema.arguments if a.name == "dropout_p"), None)
    return left is None or given.get("dropout_p", left.default_value) != 0


def is_pure(op: Op) -> bool:
    """True if equal arguments give equal results, and a call whose results are not read may be removed."""
    return not writes_to(op) and not is_random_operator(op) and not is_assertion(op)


def is_cross_mesh(op: Op) -> bool:
    """True for conversion steps from one mesh to another."""
    carry = op.carry if isinstance(op, (Start, Wait)) else op
    return isinstance(carry, Conversion) and isinstance(carry.step, Exchange)


def is_assertion(op: Op) -> bool:
    """True for assertion operators."""
    return isinstance(op, Operator) and "assert" in op._schema.name


def is_view(op: Op) -> bool:
    """True if results may share memory with arguments."""
    if isinstance(op, Conversion):
        return not op.communicates
    return isinstance(op, Operator) and (returns_memory_of_arguments(op) or op._schema.name == "aten::reshape")


@lru_cache(maxsize=4096)
def returns_memory_of_arguments(op: Operator) -> bool:
    """True if, by the schema, results are arguments or share memory with them."""
    return any(r.alias_info is not None for r in op._schema.returns)


def is_needed(op: Op, args: Sequence[Any], outs: Sequence[Value], needed: Container[Value]) -> bool:
    """True if a node must stay. `needed` are the values that later nodes read, and the results.

    A node that draws random numbers stays: without it, later nodes would draw other numbers. A step to another mesh
    stays, since the ranks of that mesh have their own programs.
    """
    if is_random_operator(op) or is_assertion(op) or is_cross_mesh(op) or any(v in needed for v in outs):
        return True
    written = [args[at] for at in writes_to(op) if isinstance(at, int) and at < len(args)]
    return any(v in needed for v in values_in(written)) or bool(writes_to(op) and not written)
