"""Nodes that must keep their order: other ranks, the random generator or the user depend on it."""

from __future__ import annotations

from meshwright.graph import Conversion, Node, is_assertion, is_random_operator


def is_collective(node: Node) -> bool:
    """True if ranks communicate in a node."""
    return isinstance(node.op, Conversion) and node.op.communicates


def has_fixed_order(node: Node) -> bool:
    """True for collectives, random operators and assertions."""
    return is_collective(node) or is_random_operator(node.op) or is_assertion(node.op)
