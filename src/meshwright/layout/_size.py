"""Sizes: integers, or symbolic integers during the recording of programs."""

from __future__ import annotations

from collections.abc import Hashable

from ._untyped import TorchValue


def hint(n: TorchValue) -> int:
    """Return the size itself; for a symbolic size, its value at creation."""
    return n if isinstance(n, int) else int(n.node.hint)


def identity(n: TorchValue) -> Hashable:
    """Return a key that is equal for equal sizes: the size, or the environment and expression of a symbolic size."""
    return n if isinstance(n, int) else (n.node.shape_env, n.node.expr)
